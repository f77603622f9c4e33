"""A traced graph whose operators change nothing that is there, and whose known numbers are numbers.

x[1:] += y          of what was there and what is new side by side
x @ weight.T        a layer
tensor(0.9) * 2     1.8
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from server_export.ir.folding import is_foldable
from server_export.ir.modules import get_attribute
from server_export.ir.operators import Category, members, rules
from server_export.ir.rewriting import remove_identities
from server_export.ir.writer import apply_rules

aten = torch.ops.aten

# What has the shape of something else, and one number everywhere.
_FILLS: dict[Any, Any] = {
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
    aten.full_like.default: None,
    aten.new_full.default: None,
}
_MATRIX = 2
_STACK = "nn_module_stack"


def functional_graph(program: ExportedProgram) -> GraphModule:
    """The graph of a traced program; all its nodes carry `meta["val"]`, and what module they belong to."""
    changes_values = any(_changes_a_value(node) for node in program.graph.nodes)
    if changes_values:
        with warnings.catch_warnings():
            # Of names inside of torch that torch itself no longer likes.
            warnings.simplefilter("ignore", FutureWarning)
            # No operator has to be taken apart: only those that change what is there are written otherwise.
            program = program.run_decompositions({})
    graph_module: GraphModule = program.module(check_guards=False)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.to.device):
        # It was traced on one that has no memory; a cast is left.
        node.target, node.args = aten.to.dtype, (node.args[0], *node.args[2:])
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    _drop_empty(graph)
    _write_fills(graph)
    _fold_numbers(graph_module)
    _write_layers(graph_module)
    if changes_values:
        remove_identities(graph_module.graph)
        apply_rules(graph_module, rules("functional"))
        stack: Any = {}
        for node in graph_module.graph.nodes:
            # What rules wrote stands behind what it is made of.
            stack = node.meta.setdefault(_STACK, stack)
    return graph_module


def _changes_a_value(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and node.target is not aten.detach_.default


def _drop_empty(graph: Graph) -> None:
    """Take out empty tensors that others are appended to, such as those of a cache, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        kept = [part for part in node.args[0] if part.meta["val"].numel()]
        if len(kept) < len(node.args[0]):
            node.args = (kept, *node.args[1:])
            if len(kept) == 1:
                node.replace_all_uses_with(kept[0])
                graph.erase_node(node)


def _write_fills(graph: Graph) -> None:
    """Write what doesn't depend on the value whose shape it has without that value, in place."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _FILLS:
            number, value = _FILLS[node.target], node.meta["val"]
            number = node.args[-1] if number is None else number
            node.target, node.args = aten.full.default, ([*value.shape], number)
            node.kwargs = {"dtype": value.dtype, "device": torch.device("meta")}


def _fold_numbers(graph_module: GraphModule) -> None:
    """Write what is computed of known single numbers as a number, in place."""
    values: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            tensor = get_attribute(graph_module, str(node.target))
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.dim() == 0:
                values[node] = tensor
        elif node.target is aten.type_as.default and node.args[0] in values:
            values[node] = values[node.args[0]].to(node.meta["val"].dtype)
        elif node.all_input_nodes and is_foldable(node, values):
            arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*arguments, **named)
    for node, value in values.items():
        # Only tensors are chosen from.
        users = [user for user in node.users if user not in values and user.target is not aten.where.self]
        for user in users:
            user.args = torch.fx.node.map_arg(
                user.args, lambda source, node=node, value=value: value.item() if source is node else source
            )
    if values:
        graph_module.graph.eliminate_dead_code()


def _write_layers(graph_module: GraphModule) -> None:
    """Write products with a weight that is transposed as layers, in place."""
    orders = members(Category.PERMUTE)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.matmul.default):
        states, turned = node.args
        source: Any = turned.args[0] if turned.target in orders else None
        if source is not None and source.op == "get_attr" and source.meta["val"].dim() == _MATRIX:
            node.target, node.args = aten.linear.default, (states, source)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
