"""Constant folding: values that depend on no input of a graph are computed at export."""

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
    """Replace nodes with constant inputs by constants, in place.

    Nodes that are larger than their inputs because they repeat them are kept.

    Args:
        graph_module: its nodes have `meta["val"]`.
        constants: the constants of the module.
        has_weights: whether the weights have values; otherwise nothing that depends on a weight is folded.
    """
    values: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            tensor = get_attribute(graph_module, str(node.target))
            # Quantized weights are tensor subclasses that give every operator their own meaning.
            is_known = has_weights or str(node.target).startswith(CONSTANT_PREFIX)
            if is_known and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                values[node] = tensor
        elif is_foldable(node, values):
            arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*arguments, **named)
    writer = GraphWriter(graph_module, constants)
    for node, value in values.items():
        has_other_users = any(user not in values for user in node.users)
        if node.op == "call_function" and isinstance(value, torch.Tensor) and has_other_users:
            with graph_module.graph.inserting_before(node):
                constant = writer.constant(value)
            node.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in values)
    graph_module.graph.eliminate_dead_code()


def is_foldable(node: Node, values: dict[Node, Any]) -> bool:
    """Return whether a node is deterministic and all its inputs are known."""
    if node.op != "call_function" or any(source not in values for source in node.all_input_nodes):
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    operator_row = row_of(node.target)
    repeats = operator_row is not None and operator_row.category in (
        Category.EXPAND,
        Category.EXPAND_LIKE,
        Category.REPEAT,
    )
    return not repeats or node.meta["val"].numel() == node.all_input_nodes[0].meta["val"].numel()
