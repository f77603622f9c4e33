"""Transform a block's graph into one that also computes forward-mode derivatives (JVPs).

Values that don't depend on a differentiated input are computed once, as before; every other value becomes a
dual. This is forward-mode differentiation along several directions (Griewank and Walther, "Evaluating
derivatives", 2008, chapter 3). It runs once, at export: the device runs a plain inference graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from prge.errors import Refusal
from prge.formats.signatures import Part, Port
from server_export.derive.jvp.adapter import RankOneMatrix, apply_to_rank_one
from server_export.ir.block import PORT, port_of
from server_export.ir.modules import make_graph_module
from server_export.ir.operators import differentiable, row_of
from server_export.ir.tangents import Dual, GraphTangents


@dataclass(frozen=True)
class Dense:
    """A differentiated input whose tangents [queries, *shape] are an input."""


@dataclass(frozen=True)
class RankOne:
    """A differentiated adapter matrix [1, rank, width], passed as [rank, width], which `rows` rows share.

    Its tangent for a query and row is u v^T: two inputs, f32 [queries, rows, rank] and [queries, rows,
    width].
    """

    rows: int


Seed = Dense | RankOne

ONES = "ones"


def differentiate(
    graph_module: GraphModule, seeds: Mapping[str, Seed], queries: int, ones: Mapping[str, int]
) -> GraphModule:
    """Return a graph that computes a block's outputs and their derivatives along several directions.

        seeds = {"hidden_states": Dense(), "lora_b": RankOne(rows=8)}
        graph = differentiate(block, seeds, queries=2, ones={"ones": 128})
        output, tangents = graph(hidden, table, ones, lora_b, d_hidden, u_lora_b, v_lora_b)

    No constant has a shape that depends on rows, tokens or queries, if these differ from all widths.

    Args:
        graph_module: a rewritten graph; its nodes have `meta["val"]`. Its constants are shared.
        seeds: the differentiated inputs by placeholder name. Their tangents become inputs after all others,
            in the order of the graph.
        queries: the number of tangents of every value.
        ones: names of inputs f32 [1, length, 1] of ones, by the length of the dimensions that they sum.

    Returns:
        A module that returns every output [...] followed by its tangents [queries, ...]. It takes `ones`
        before the adapter, except those that nothing reads. Its nodes have `meta["val"]`.

    Raises:
        Refusal: an operator has no rule, or the output doesn't depend on the differentiated inputs.
    """
    graph = Graph()
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    adapter = [node for node in placeholders if isinstance(seeds.get(str(node.target)), RankOne)]
    copies = {node: graph.node_copy(node) for node in placeholders if node not in adapter}
    template = next(node for node in placeholders if str(node.target) in seeds)
    ones_inputs = {length: _input(graph, name, template, 1, length, 1) for name, length in ones.items()}
    for node in ones_inputs.values():
        node.meta[PORT] = Port(str(node.target))
    copies |= {node: _input(graph, str(node.target), node, *node.meta["val"].shape[1:]) for node in adapter}
    for node in adapter:
        _set_tangent_port(copies[node], node, Part.VALUE)
    writer = GraphTangents(graph_module, graph, queries, ones_inputs)
    duals = _write_duals(writer, copies, seeds)
    outputs = [(dual.value, dual.tangents) for dual in duals]
    graph.output(tuple(part for pair in outputs for part in pair))
    graph.eliminate_dead_code()
    for node in ones_inputs.values():
        if not node.users:
            graph.erase_node(node)
    return make_graph_module(graph_module, graph)


def _write_duals(writer: GraphTangents, copies: Mapping[Node, Node], seeds: Mapping[str, Seed]) -> list[Dual]:
    """Write the graph with tangents and return its outputs; `copies` are the inputs of the new graph."""
    values = dict[Node, Any]()
    for node in writer.graph_module.graph.find_nodes(op="placeholder"):
        seed = seeds.get(str(node.target))
        values[node] = copies[node] if seed is None else _seed(writer, node, copies[node], seed)
    for node in writer.graph_module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            return [_check_dual(values[output]) for output in node.args[0]]
        if any(isinstance(values[source], Dual | RankOneMatrix | tuple) for source in node.all_input_nodes):
            values[node] = _apply_rule(writer, node, values)
        else:
            values[node] = writer.graph.node_copy(node, values.__getitem__)
    raise AssertionError("The graph has no output node.")


def _seed(writer: GraphTangents, node: Node, copy: Node, seed: Seed) -> Dual | RankOneMatrix:
    name, shape = str(node.target), tuple(node.meta["val"].shape)
    if isinstance(seed, Dense):
        tangents = _input(writer.graph, f"tangent_{name}", node, writer.queries, *shape)
        _set_tangent_port(tangents, node, Part.TANGENT)
        return Dual(writer, writer.as_primal(copy), tangents)
    u, v = (
        _input(writer.graph, f"{factor}_{name}", node, writer.queries, seed.rows, width)
        for factor, width in (("u", shape[1]), ("v", shape[2]))
    )
    for factor, part in ((u, Part.U), (v, Part.V)):
        _set_tangent_port(factor, node, part)
    return RankOneMatrix(writer.reshape(copy, shape), u, v, seed.rows, *shape[1:])


def _input(graph: Graph, name: str, like: Node, *shape: int) -> Node:
    """Add a placeholder with the dtype of another one."""
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(shape, dtype=like.meta["val"].dtype, device="meta")
    return node


def _set_tangent_port(node: Node, primal: Node, part: Part) -> None:
    """Give the input of a tangent the port that follows from the port of the value, if the value has one."""
    if (port := port_of(primal)) is not None:
        node.meta[PORT] = port.of(part)


def _apply_rule(writer: GraphTangents, node: Node, values: Mapping[Node, Any]) -> Any:
    operator_row = row_of(node.target)
    arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        if any(isinstance(value, RankOneMatrix) for value in arguments):
            return apply_to_rank_one(writer, node, *arguments)
        if operator_row is not None and operator_row.jvp is not None:
            return operator_row.jvp(writer, node, *arguments, **named)
    except NotImplementedError:
        pass
    raise _no_rule_error(node)


def check_jvp_rules(graph_module: GraphModule, differentiated: Collection[str]) -> None:
    """Refuse a graph that can't be differentiated by the inputs with these names.

    Raises:
        Refusal: an ATen operator has no rule.
    """
    depending, known = set[Node](), differentiable()
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" and str(node.target) in differentiated:
            depending.add(node)
        if not depending.intersection(node.all_input_nodes):
            continue
        if str(node.target).startswith("aten.") and str(node.target) not in known:
            raise _no_rule_error(node)
        # Indices, comparisons and values that depend on a shape alone have no tangents.
        value = node.meta.get("val")
        is_float = not isinstance(value, torch.Tensor) or value.is_floating_point()
        if is_float and node.target is not torch.ops.aten.full_like.default:
            depending.add(node)


def _no_rule_error(node: Node) -> Refusal:
    return Refusal(
        "operator-without-derivative",
        f"The operator {node.target} in {_module_of_node(node)} has no forward-mode derivative in prge.",
        operator=str(node.target),
        module=_module_of_node(node),
        remedy="Leave jvp out of --roles, and please report the name of the model.",
    )


def _check_dual(dual: Any) -> Dual:
    if not isinstance(dual, Dual):
        raise Refusal(
            "independent-of-adapter",
            "The output of the program does not depend on the adapter.",
            remedy="Choose --target-modules that the output depends on.",
        )
    return dual


def _module_of_node(node: Node) -> str:
    """Return the path of the module that a node was traced in."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values() if entry[0]]
    return paths[-1] if paths else "the program"
