"""A model's graph, cut into blocks where one value alone is alive, and the kinds of these blocks.

    embedding   tokens -> state        block   state -> state        head   state -> answer

The points are found in the graph, not in the model's code. Stretches between them that come again and again,
such as attention and what follows it, are one block. What is before the first of these is the embedding,
what is after the last one the head. Where a layer of the model would end inside of a block, as where
attention and a recurrence take turns, each layer is a block. Blocks of the same operators and shapes are of
one kind, whatever weights they read, and whatever tables and adapters they are given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from server_export.graph.modules import as_module, attribute
from server_export.graph.softmax_parts import SOFTMAX_PARTS

STATE, TABLE_PREFIX = "state", "table_"
_STATE_DIMENSIONS = 3


@dataclass(frozen=True)
class ModelBlock:
    """A stretch of a model.

    `graph_module` has the placeholders `state` or what the model's graph takes, then `table_0`, ..., then the
    adapter's, and one output. `weights` are the names of its frozen tensors, in the order of their use;
    blocks of one kind use theirs in the same order. `tables` are the numbers of its tables, `adapter` its
    placeholders of the model's adapter.
    """

    graph_module: GraphModule
    weights: tuple[str, ...]
    tables: tuple[int, ...]
    adapter: tuple[str, ...]
    signature: tuple[Any, ...]


def cut(graph_module: GraphModule, adapter: Collection[str], table: Any) -> list[ModelBlock]:
    """The blocks of a model's graph in order; a graph without points to cut at is one block.

    Args:
        graph_module: its first placeholder is what all blocks depend on; its nodes carry `meta["val"]`.
        adapter: placeholders of the adapter.
        table: the operator that stands for a table; its first argument is its number.
    """
    nodes = list(graph_module.graph.nodes)
    (output,) = (node for node in nodes if node.op == "output")
    source = next(node for node in nodes if node.op == "placeholder")
    flow = reached([source])
    answer = output.args[0][0]
    points = [point for point in _points(nodes, source, flow) if point is not answer]
    # Logits are alone alive too, and no head begins behind them.
    while points and not _frozen_shapes(answer, points[-1], adapter):
        points.pop()
    stretches = list(zip([source, *points], [*points, answer], strict=True))
    shapes = [_frozen_shapes(end, start, adapter) for start, end in stretches]
    has_head = answer.target is SOFTMAX_PARTS
    ends = [stretches[last][1] for last in _last_of_blocks(shapes, has_head)]
    by_layer = _ends_of_layers(nodes, points)
    if not {*by_layer} <= {*ends}:
        ends = [*by_layer, answer]
    starts = [source, *ends[:-1]]
    return [
        _block(graph_module, start, end, adapter, table, is_first=start is source)
        for start, end in zip(starts, ends, strict=True)
    ]


def kinds(blocks: Sequence[ModelBlock]) -> list[int]:
    """The number of each block's kind: that of the first block of the same signature."""
    first: dict[Any, int] = {}
    return [first.setdefault(block.signature, number) for number, block in enumerate(blocks)]


def reached(sources: Iterable[Node]) -> set[Node]:
    """All nodes that depend on some, with them."""
    found: set[Node] = set()
    ahead = list(sources)
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead.extend(node.users)
    return found


def _points(nodes: Sequence[Node], source: Node, flow: set[Node]) -> list[Node]:
    """States float32 [rows, tokens, width] that are alone alive of what depends on the source."""
    place = {node: index for index, node in enumerate(nodes)}
    rows, tokens = source.meta["val"].shape
    ends: dict[int, int] = {}
    alive, points = 0, []
    for index, node in enumerate(nodes):
        users = [place[user] for user in node.users] if node in flow else []
        if users:
            alive += 1
            ends[max(users)] = ends.get(max(users), 0) + 1
        alive -= ends.pop(index, 0)
        value = node.meta.get("val")
        if (
            alive == 1
            and users
            and isinstance(value, torch.Tensor)
            and value.dtype == torch.float32
            and value.dim() == _STATE_DIMENSIONS
            and tuple(value.shape[:2]) == (rows, tokens)
        ):
            points.append(node)
    return points


def _ends_of_layers(nodes: Sequence[Node], points: Sequence[Node]) -> list[Node]:
    """Where the embedding and each member of the model's list of layers end; nothing if any is no point.

    The list is the one that most of the graph belongs to.
    """
    members: dict[str, dict[str, list[int]]] = {}
    for index, node in enumerate(nodes):
        stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
        paths = (str(path).rpartition(".") for path, _ in stack.values())
        name, _, number = next((path for path in paths if path[2].isdigit()), ("", "", ""))
        if number:
            members.setdefault(name, {}).setdefault(number, []).append(index)
    if not members:
        return []
    layers = max(members.values(), key=lambda each: sum(map(len, each.values())))
    begin = min(min(places) for places in layers.values())
    place = {node: index for index, node in enumerate(nodes)}
    before = [point for point in points if place[point] < begin]
    found = [nodes[max(places)] for places in layers.values()]
    return [before[-1], *found] if before and {*found} <= {*points} else []


def _between(end: Node, start: Node) -> set[Node]:
    """What is computed of `start` on the way to `end`, with all that it needs besides."""
    found: set[Node] = set()
    ahead = [end]
    while ahead:
        node = ahead.pop()
        if node is not start and node not in found:
            found.add(node)
            ahead.extend(node.all_input_nodes)
    return found


def _frozen_shapes(end: Node, start: Node, adapter: Collection[str]) -> tuple[Any, ...]:
    """Shapes of the weights that a stretch reads, but for those of an adapter, in the order of their use."""
    needed = _between(end, start)
    by_adapter = {node for node in needed if node.op == "placeholder" and str(node.target) in adapter}
    shapes = []
    for node in end.graph.nodes:
        if node in needed and not by_adapter.intersection(_nearby(node)):
            shapes += [tuple(n.meta["val"].shape) for n in node.all_input_nodes if n.op == "get_attr"]
    return tuple(shapes)


def _nearby(node: Node) -> set[Node]:
    """What a node's answer meets, after changes of shape."""
    found: set[Node] = set()
    ahead = list(node.users)
    while ahead:
        user = ahead.pop()
        found.update(user.all_input_nodes)
        if user.target in (torch.ops.aten.reshape.default, torch.ops.aten.view.default):
            ahead.extend(user.users)
    return found


def _last_of_blocks(shapes: Sequence[Any], has_head: bool) -> list[int]:
    """The last stretches of blocks: of the longest run of a shortest period, and of what is around it.

    Without any run all between the first stretch, and the last one if that is a head, is one block.
    """
    count = len(shapes)
    best = (0, 0, 0)  # stretches that repeat, minus the period, minus the start
    for period in range(1, count // 2 + 1):
        start = 0
        while start + 2 * period <= count:
            length = period
            while start + length < count and shapes[start + length] == shapes[start + length - period]:
                length += 1
            repeats = length // period
            if repeats > 1 and any(shapes[start : start + period]):
                best = max(best, (repeats * period, -period, -start))
            start += max(1, length - period + 1)
    covered, period, start = best[0], -best[1], -best[2]
    if not covered:
        return sorted({0, max(0, count - 1 - has_head), count - 1})
    ends = [start - 1] if start else []
    ends += range(start + period - 1, start + covered, period)
    return [*ends, count - 1] if ends[-1] < count - 1 else list(ends)


def _block(
    graph_module: GraphModule,
    start: Node,
    end: Node,
    adapter: Collection[str],
    table: Any,
    is_first: bool,
) -> ModelBlock:
    needed = _between(end, start)
    graph = Graph()
    values: dict[Node, Node] = {}

    def placeholder(node: Node, name: str) -> None:
        values[node] = graph.placeholder(name)
        values[node].meta["val"] = node.meta["val"]

    order = [node for node in start.graph.nodes if node in needed]
    given = [node for node in order if node.op == "placeholder"]
    tables: dict[int, Node] = {}
    placeholder(start, str(start.target) if is_first else STATE)
    for node in given:
        if str(node.target) not in adapter:
            placeholder(node, str(node.target))
    for node in order:
        if node.target is table:
            number = node.args[0]
            assert isinstance(number, int)
            if number not in tables:
                placeholder(node, f"{TABLE_PREFIX}{len(tables)}")
                tables[number] = values[node]
            values[node] = tables[number]
    trained = tuple(str(node.target) for node in given if str(node.target) in adapter)
    for node in given:
        if str(node.target) in adapter:
            placeholder(node, str(node.target))
    for node in order:
        if node not in values and node.op != "get_attr":
            for weight in node.all_input_nodes:
                if weight.op == "get_attr" and weight not in values:
                    values[weight] = graph.node_copy(weight)
            values[node] = graph.node_copy(node, values.__getitem__)
    graph.output((values[end],))
    weights = tuple(dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr"))
    return ModelBlock(
        as_module(graph_module, graph), weights, tuple(tables), trained, _signature(graph_module, graph)
    )


def _signature(graph_module: GraphModule, graph: Graph) -> tuple[Any, ...]:
    """What two graphs have in common exactly if they compute the same of their inputs and weights."""
    numbers: dict[Node, int] = {}
    weights: dict[str, int] = {}
    lines: list[tuple[Any, ...]] = []
    for node in graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "get_attr":
            tensor = attribute(graph_module, str(node.target))
            place = weights.setdefault(str(node.target), len(weights))
            lines.append(("weight", place, tuple(tensor.shape), tensor.dtype))
        elif node.op == "placeholder":
            lines.append(("input", tuple(node.meta["val"].shape), node.meta["val"].dtype))
        else:
            lines.append((node.op, str(node.target), _key(node.args, numbers), _key(node.kwargs, numbers)))
    return tuple(lines)


def _key(value: Any, numbers: Mapping[Node, int]) -> Any:
    if isinstance(value, Node):
        return "node", numbers[value]
    if isinstance(value, Mapping):
        return tuple((name, _key(each, numbers)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_key(each, numbers) for each in value)
    return type(value).__name__, str(value)
