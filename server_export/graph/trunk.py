"""The cut of a program's graph: below it nothing depends on the adapter, above it nothing on the tokens.

    trunk   tokens -> what crosses the cut
    step    what crosses the cut, and all inputs but the tokens -> the answer

The cut is the last value without adapter that every path from the tokens to the answer goes through: in a
usual model the states that enter the first adapted block. Where no single value above a layer is on all
paths, it is every value that an adapted operator takes. What lies above the cut and needs neither tokens nor
adapter, such as a mask, is computed in the step again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from prge.contract import TRUNK_PREFIX
from prge.errors import ConfigError
from server_export.graph.cutting import reached

aten = torch.ops.aten

_PRODUCTS = {aten.linear.default, aten.bmm.default, aten.mm.default, aten.addmm.default, aten.matmul.default}


def split(
    graph_module: GraphModule, trunk_inputs: Sequence[str], adapter: Collection[str]
) -> tuple[GraphModule, GraphModule]:
    """Trunk and step of a graph.

    Args:
        graph_module: a rewritten graph; its nodes carry `meta["val"]`. Its constants are shared.
        trunk_inputs: placeholders that the trunk takes, the tokens first.
        adapter: placeholders of the adapter.

    Returns:
        A module that returns a tuple of values, and one that takes these in the place of the tokens.

    Raises:
        ConfigError: what crosses the cut has no rows.
    """
    nodes = list(graph_module.graph.nodes)
    placeholders = {str(node.target): node for node in nodes if node.op == "placeholder"}
    tokens = placeholders[trunk_inputs[0]]
    by_tokens = reached([tokens])
    by_adapter = reached([placeholders[name] for name in adapter])
    cut = _waist(nodes, tokens, by_tokens, by_adapter)
    if not any(map(_is_layer, _needed(cut))):
        cut = _frontier(nodes, by_tokens, by_adapter)
    below = _needed(cut)
    rows = tokens.meta["val"].shape[0]
    odd = [node for node in cut if not _has_rows(node, rows)]
    if odd:
        raise ConfigError(
            "the program can't be cut into trunk and step:",
            [f"{node.name} crosses the cut and isn't float32 states of {rows} rows" for node in odd],
            remedy="leave --trunk-cache out, and please report it with the name of the model",
        )
    return (
        _trunk(graph_module, [placeholders[name] for name in trunk_inputs], cut, below),
        _step(graph_module, tokens, cut),
    )


def _waist(nodes: Sequence[Node], tokens: Node, by_tokens: set[Node], by_adapter: set[Node]) -> list[Node]:
    """The last value without adapter that is alone alive when it is made; nothing if there is none.

    In whatever order a graph is written, a value that all paths go through is alone alive at that point.
    """
    place = {node: index for index, node in enumerate(nodes)}
    rows = tokens.meta["val"].shape[0]
    ends: dict[int, int] = {}
    alive, found = 0, None
    for index, node in enumerate(nodes):
        if node in by_tokens and node.users:
            alive += 1
            last = max(place[user] for user in node.users)
            ends[last] = ends.get(last, 0) + 1
        alive -= ends.pop(index, 0)
        if alive == 1 and node in by_tokens and node not in by_adapter and _has_rows(node, rows):
            found = node
    return [] if found is None else [found]


def _frontier(nodes: Sequence[Node], by_tokens: set[Node], by_adapter: set[Node]) -> list[Node]:
    """Values of the tokens that don't depend on the adapter and are used by what does."""
    return [
        node
        for node in nodes
        if node in by_tokens and node not in by_adapter and not by_adapter.isdisjoint(node.users)
    ]


def _needed(targets: Iterable[Node], known: Collection[Node] = ()) -> set[Node]:
    """All nodes that some depend on, with them, without those that are known and what only these need."""
    found: set[Node] = set()
    ahead = list(targets)
    while ahead:
        node = ahead.pop()
        if node not in found and node not in known:
            found.add(node)
            ahead.extend(node.all_input_nodes)
    return found


def _has_rows(node: Node, rows: int) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.dim() > 1
        and value.shape[0] == rows
    )


def _is_layer(node: Node) -> bool:
    """Whether a node is a matrix product; a mean, which is a product with one row, isn't meant."""
    return node.target in _PRODUCTS and node.meta["val"].shape[-1] > 1


def _trunk(
    graph_module: GraphModule, inputs: Sequence[Node], cut: Sequence[Node], below: set[Node]
) -> GraphModule:
    graph = Graph()
    values: dict[Node, Node] = {}
    for node in inputs:
        values[node] = graph.node_copy(node)
    for node in graph_module.graph.nodes:
        if node in below and node not in values:
            values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in cut))
    return GraphModule(graph_module, graph)


def _step(graph_module: GraphModule, tokens: Node, cut: Sequence[Node]) -> GraphModule:
    graph = Graph()
    values: dict[Node, Node] = {}
    for index, node in enumerate(cut):
        values[node] = graph.placeholder(f"{TRUNK_PREFIX}{index}".replace(".", "_"))
        values[node].meta["val"] = node.meta["val"]
    outputs = [node for node in graph_module.graph.nodes if node.op == "output"]
    above = _needed(outputs, known=cut)
    for node in graph_module.graph.nodes:
        if node in values or node is tokens or (node not in above and node.op != "placeholder"):
            continue
        values[node] = graph.node_copy(node, values.__getitem__)
    return GraphModule(graph_module, graph)
