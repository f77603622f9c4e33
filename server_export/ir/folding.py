"""What depends on no input of a graph is computed at export, and becomes a constant."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from server_export.ir.constants import CONSTANT_PREFIX, GraphConstants
from server_export.ir.modules import get_attribute
from server_export.ir.operators import Category, row_of
from server_export.ir.writer import GraphWriter


def fold_constants(graph_module: GraphModule, constants: GraphConstants, has_weights: bool = True) -> None:
    """Compute every node that has constant inputs only, and isn't larger than these by repetition, in place.

    Args:
        graph_module: its nodes carry `meta["val"]`.
        constants: of the module.
        has_weights: whether weights have their numbers; without them nothing is computed of any.
    """
    values: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            tensor = get_attribute(graph_module, str(node.target))
            # A quantized weight is a subclass with its own meaning of every operator.
            is_known = has_weights or str(node.target).startswith(CONSTANT_PREFIX)
            if is_known and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                values[node] = tensor
        elif is_foldable(node, values):
            arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*arguments, **named)
    writer = GraphWriter(graph_module, constants)
    for node, value in values.items():
        is_read = any(user not in values for user in node.users)
        if node.op == "call_function" and isinstance(value, torch.Tensor) and is_read:
            with graph_module.graph.inserting_before(node):
                constant = writer.constant(value)
            node.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in values)
    graph_module.graph.eliminate_dead_code()


def is_foldable(node: Node, values: dict[Node, Any]) -> bool:
    """Whether all that an operator computes of is known, and its result follows from that alone."""
    if node.op != "call_function" or any(source not in values for source in node.all_input_nodes):
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    known = row_of(node.target)
    repeats = known is not None and known.category in (
        Category.EXPAND,
        Category.EXPAND_LIKE,
        Category.REPEAT,
    )
    return not repeats or node.meta["val"].numel() == node.all_input_nodes[0].meta["val"].numel()
