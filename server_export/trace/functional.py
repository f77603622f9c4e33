"""Make a traced graph functional, and replace tensors that are known numbers by numbers.

x[1:] += y          becomes a concatenation of the old and the new elements
x @ weight.T        becomes a linear layer
tensor(0.9) * 2     becomes 1.8
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

# Operators that fill the shape of another tensor with one number; None: the number is their last argument.
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
    """Return the functional graph of a traced program; its nodes have `meta["val"]` and their module."""
    changes_values = any(_mutates(node) for node in program.graph.nodes)
    if changes_values:
        with warnings.catch_warnings():
            # torch warns about its own deprecated names.
            warnings.simplefilter("ignore", FutureWarning)
            # With an empty table only in-place operators are replaced; no operator is decomposed.
            program = program.run_decompositions({})
    graph_module: GraphModule = program.module(check_guards=False)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.to.device):
        # The program was traced on the meta device; only the cast remains.
        node.target, node.args = aten.to.dtype, (node.args[0], *node.args[2:])
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    _remove_empty_parts(graph)
    _write_full(graph)
    _fold_known_numbers(graph_module)
    _write_linear(graph_module)
    if changes_values:
        remove_identities(graph_module.graph)
        apply_rules(graph_module, rules("functional"))
        stack: Any = {}
        for node in graph_module.graph.nodes:
            # New nodes belong to the module of the node before them.
            stack = node.meta.setdefault(_STACK, stack)
    return graph_module


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and node.target is not aten.detach_.default


def _remove_empty_parts(graph: Graph) -> None:
    """Remove empty tensors from concatenations, such as those of an empty cache, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = [part for part in node.args[0] if part.meta["val"].numel()]
        if len(parts) < len(node.args[0]):
            node.args = (parts, *node.args[1:])
            if len(parts) == 1:
                node.replace_all_uses_with(parts[0])
                graph.erase_node(node)


def _write_full(graph: Graph) -> None:
    """Write tensors that only take their shape from another value without this value, in place."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _FILLS:
            number, value = _FILLS[node.target], node.meta["val"]
            number = node.args[-1] if number is None else number
            node.target, node.args = aten.full.default, ([*value.shape], number)
            node.kwargs = {"dtype": value.dtype, "device": torch.device("meta")}


def _fold_known_numbers(graph_module: GraphModule) -> None:
    """Replace nodes that are computed from known scalars by numbers, in place."""
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
        # where takes tensors only.
        users = [user for user in node.users if user not in values and user.target is not aten.where.self]
        for user in users:
            user.args = torch.fx.node.map_arg(
                user.args, lambda source, node=node, value=value: value.item() if source is node else source
            )
    if values:
        graph_module.graph.eliminate_dead_code()


def _write_linear(graph_module: GraphModule) -> None:
    """Write products with a transposed weight as linear layers, in place."""
    orders = members(Category.PERMUTE)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.matmul.default):
        states, transposed = node.args
        source: Any = transposed.args[0] if transposed.target in orders else None
        if source is not None and source.op == "get_attr" and source.meta["val"].dim() == _MATRIX:
            node.target, node.args = aten.linear.default, (states, source)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
