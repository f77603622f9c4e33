"""The transformation: a block's graph and its differentiated inputs in, the same with tangents out.

Values that don't depend on a differentiated input are computed once, as before; every other one becomes a
dual. This is forward-mode differentiation with several directions (Griewank and Walther, "Evaluating
derivatives", 2008, chapter 3), done once, at export: what runs on the device is a plain inference graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from prge.errors import Refusal
from prge.files.signatures import Part, Port
from server_export.derive.tangent.adapter import Factors, of_factors
from server_export.ir.block import PORT, port_of
from server_export.ir.modules import as_module
from server_export.ir.operators import differentiable, row_of
from server_export.ir.tangents import Dual, Tangents


@dataclass(frozen=True)
class Dense:
    """A differentiated input with a tangent [queries, *shape] of its own for each query."""


@dataclass(frozen=True)
class RankOne:
    """A differentiated adapter matrix [1, rank, width], given as [rank, width]; `rows` share it.

    Its tangent of a query and row is u v^T: two inputs, f32 [queries, rows, rank] and [queries, rows, width].
    """

    rows: int


Seed = Dense | RankOne

ONES = "ones"


def differentiate(
    graph_module: GraphModule, seeds: Mapping[str, Seed], queries: int, ones: Mapping[str, int]
) -> GraphModule:
    """Make a graph that computes a block's answers and their derivatives along several directions.

        seeds = {"state": Dense(), "lora_b": RankOne(rows=8)}
        graph = differentiate(block, seeds, queries=2, ones={"ones": 128})
        state, tangents = graph(state, table, ones, lora_b, d_state, u_lora_b, v_lora_b)

    No constant of it has a shape that depends on rows, tokens or queries, if these differ from all widths.

    Args:
        graph_module: rewritten, its nodes carry `meta["val"]`. Its constants are shared.
        seeds: by placeholder name, which inputs are differentiated. Their tangents become inputs after all
            others, in the order of the graph.
        queries: tangents of every value.
        ones: names of inputs f32 [1, length, 1] of ones, which add up, by lengths that no constant has.

    Returns:
        A module that returns every output [...] with its tangents [queries, ...] behind it. It takes `ones`
        before the adapter, but for those that nothing reads. Its nodes carry `meta["val"]`.

    Raises:
        Refusal: an operator has no rule, or the output doesn't depend on the differentiated inputs.
    """
    graph = Graph()
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    adapter = [node for node in placeholders if isinstance(seeds.get(str(node.target)), RankOne)]
    copies = {node: graph.node_copy(node) for node in placeholders if node not in adapter}
    like = next(node for node in placeholders if str(node.target) in seeds)
    sums = {length: _input(graph, name, like, 1, length, 1) for name, length in ones.items()}
    for node in sums.values():
        node.meta[PORT] = Port(str(node.target))
    copies |= {node: _input(graph, str(node.target), node, *node.meta["val"].shape[1:]) for node in adapter}
    for node in adapter:
        _give_port(copies[node], node, Part.VALUE)
    writer = Tangents(graph_module, graph, queries, sums)
    answers = _differentiated(writer, copies, seeds)
    pairs = [(each.value, each.tangents) for each in answers]
    graph.output(tuple(part for pair in pairs for part in pair))
    graph.eliminate_dead_code()
    for node in sums.values():
        if not node.users:
            graph.erase_node(node)
    return as_module(graph_module, graph)


def _differentiated(writer: Tangents, copies: Mapping[Node, Node], seeds: Mapping[str, Seed]) -> list[Dual]:
    """Write a graph with tangents; returns its answers. `copies` are the new graph's inputs."""
    values = dict[Node, Any]()
    for node in writer.graph_module.graph.find_nodes(op="placeholder"):
        seed = seeds.get(str(node.target))
        values[node] = copies[node] if seed is None else _seeded(writer, node, copies[node], seed)
    for node in writer.graph_module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            return [_answer(values[answer]) for answer in node.args[0]]
        if any(isinstance(values[source], Dual | Factors | tuple) for source in node.all_input_nodes):
            values[node] = _apply_rule(writer, node, values)
        else:
            values[node] = writer.graph.node_copy(node, values.__getitem__)
    raise AssertionError("a graph ends with its output")


def _seeded(writer: Tangents, node: Node, copy: Node, seed: Seed) -> Dual | Factors:
    name, shape = str(node.target), tuple(node.meta["val"].shape)
    if isinstance(seed, Dense):
        tangents = _input(writer.graph, f"d_{name}", node, writer.queries, *shape)
        _give_port(tangents, node, Part.TANGENT)
        return Dual(writer, writer.one_of(copy), tangents)
    u, v = (
        _input(writer.graph, f"{factor}_{name}", node, writer.queries, seed.rows, width)
        for factor, width in (("u", shape[1]), ("v", shape[2]))
    )
    for factor, part in ((u, Part.U), (v, Part.V)):
        _give_port(factor, node, part)
    return Factors(writer.reshape(copy, shape), u, v, seed.rows, *shape[1:])


def _input(graph: Graph, name: str, like: Node, *shape: int) -> Node:
    """A placeholder of another one's type."""
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(shape, dtype=like.meta["val"].dtype, device="meta")
    return node


def _give_port(node: Node, primal: Node, part: Part) -> None:
    """Give a tangent's input the port that follows from the value's, if that has one."""
    if (port := port_of(primal)) is not None:
        node.meta[PORT] = port.of(part)


def _apply_rule(writer: Tangents, node: Node, values: Mapping[Node, Any]) -> Any:
    known = row_of(node.target)
    arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        if any(isinstance(value, Factors) for value in arguments):
            return of_factors(writer, node, *arguments)
        if known is not None and known.jvp is not None:
            return known.jvp(writer, node, *arguments, **named)
    except NotImplementedError:
        pass
    raise _no_rule(node)


def check_rules(graph_module: GraphModule, differentiated: Collection[str]) -> None:
    """Refuse a graph before it is differentiated by inputs of these names.

    Raises:
        Refusal: an operator of PyTorch's has no rule.
    """
    depending, known = set[Node](), differentiable()
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" and str(node.target) in differentiated:
            depending.add(node)
        if not depending.intersection(node.all_input_nodes):
            continue
        if str(node.target).startswith("aten.") and str(node.target) not in known:
            raise _no_rule(node)
        # What is chosen, or compared, or of a shape alone has no tangent.
        value = node.meta.get("val")
        is_number = not isinstance(value, torch.Tensor) or value.is_floating_point()
        if is_number and node.target is not torch.ops.aten.full_like.default:
            depending.add(node)


def _no_rule(node: Node) -> Refusal:
    return Refusal(
        "operator-without-derivative",
        f"the operator {node.target} in {_origin(node)} has no forward-mode derivative here",
        operator=str(node.target),
        module=_origin(node),
        remedy="leave tangent out of --roles, and please report it with the name of the model",
    )


def _answer(dual: Any) -> Dual:
    if not isinstance(dual, Dual):
        raise Refusal(
            "independent-of-adapter",
            "the program's output doesn't depend on the adapter",
            remedy="choose target modules that the output depends on",
        )
    return dual


def _origin(node: Node) -> str:
    """The module of the model that a node was traced in."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values() if entry[0]]
    return paths[-1] if paths else "the program"
