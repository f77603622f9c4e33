"""A model's graph, cut into blocks where one value alone is alive, and the kinds of these blocks.

    embedding   tokens -> state        block   state -> state        head   state -> answer

The points are found in the graph, not in the model's code. Stretches between them that come again and again,
such as attention and what follows it, are one block. What is before the first of these is the embedding,
what is after the last one the head. Blocks of the same operators and shapes are of one kind, whatever
weights they read, and whatever tables and adapters they are given.

Some models have several values alive everywhere, such as streams beside the state, or keys and values that
later layers read too. They are cut where a layer ends, and the state is all of these side by side. So is it
before and behind experts, which are blocks of their own:

    block   state -> [what experts see, shares, index, rest]     next block   [what they say, rest] -> ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from server_export.graph.experts import EXPERTS
from server_export.graph.modules import as_module, attribute
from server_export.graph.shapes import without_memory
from server_export.graph.softmax_parts import SOFTMAX_PARTS

STATE, TABLE_PREFIX = "state", "table_"
_STATE_DIMENSIONS = 3
aten = torch.ops.aten

# What crosses a cut.
Values: TypeAlias = tuple[Node, ...]


@dataclass(frozen=True)
class ModelBlock:
    """A stretch of a model.

    `graph_module` has the placeholders `state` or what the model's graph takes, then `table_0`, ..., then the
    adapter's, and one output. `weights` are the names of its frozen tensors, in the order of their use;
    blocks of one kind use theirs in the same order. `tables` are the numbers of its tables, `adapter` its
    placeholders of the model's adapter. `experts` is the number of the layer whose experts come behind it;
    `is_expert` says that it is one of them.
    """

    graph_module: GraphModule
    weights: tuple[str, ...]
    tables: tuple[int, ...]
    adapter: tuple[str, ...]
    signature: tuple[Any, ...]
    experts: int | None = None
    is_expert: bool = False


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
    answer = (output.args[0][0],)
    alive = _alive(nodes, reached([source]))
    places = [place for place, values in alive.items() if len(values) == 1]
    ends, repeats = _ends(alive, places, source, answer, adapter)
    if not repeats and (several := {*places, *_ends_of_layers(nodes)}):
        ends, _ = _ends(alive, sorted(several & {*alive}), source, answer, adapter)
    sizes = tuple(source.meta["val"].shape)
    return [
        replace(_block(graph_module, start, end, adapter, table, start == (source,), sizes), experts=experts)
        for start, end, experts in _stretches(nodes, source, ends)
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


def _alive(nodes: Sequence[Node], flow: set[Node]) -> dict[int, Values]:
    """What of the flow is needed behind a place, by places; those with what can't be a state are left out."""
    place = {node: index for index, node in enumerate(nodes)}
    rows, tokens = next(node for node in nodes if node.op == "placeholder").meta["val"].shape
    last = {node: max(map(place.__getitem__, node.users), default=-1) for node in flow}
    found: dict[int, Values] = {}
    alive: list[Node] = []
    for index, node in enumerate(nodes):
        alive = [each for each in [*alive, node] if each in flow and last[each] > index]
        if alive and all(_may_cross(each, rows, tokens) for each in alive):
            found[index] = tuple(alive)
    return {
        index: values
        for index, values in found.items()
        if len(values) > 1 or values[0].meta["val"].shape[:-1] == (rows, tokens)
    }


def _may_cross(node: Node, rows: int, tokens: int) -> bool:
    """Whether a value is numbers of each token."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return False
    shape = list(value.shape)
    return value.dim() >= _STATE_DIMENSIONS and shape.count(rows) == shape.count(tokens) == 1


def _ends_of_layers(nodes: Sequence[Node]) -> list[int]:
    """Where the members of the model's list of layers end: of the list that most of the graph belongs to."""
    members: dict[str, dict[str, int]] = {}
    sizes: dict[str, int] = {}
    for index, node in enumerate(nodes):
        stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
        paths = (str(path).rpartition(".") for path, _ in stack.values())
        of_list = next((path for path in paths if path[2].isdigit()), None)
        if of_list is not None:
            members.setdefault(of_list[0], {})[of_list[2]] = index
            sizes[of_list[0]] = sizes.get(of_list[0], 0) + 1
    return list(members[max(sizes, key=sizes.__getitem__)].values()) if sizes else []


def _ends(
    alive: Mapping[int, Values], places: Sequence[int], source: Node, answer: Values, adapter: Collection[str]
) -> tuple[list[Values], bool]:
    """Where blocks end that are cut at some of these places, and whether stretches between them repeat."""
    points = [values for values in dict.fromkeys(alive[place] for place in places) if values != answer]
    # Logits are alone alive too, and no head begins behind them.
    while points and not _frozen_shapes(answer, points[-1], adapter):
        points.pop()
    stretches = list(zip([(source,), *points], [*points, answer], strict=True))
    shapes = [_frozen_shapes(end, start, adapter) for start, end in stretches]
    last, repeats = _last_of_blocks(shapes, answer[0].target is SOFTMAX_PARTS)
    return [stretches[index][1] for index in last], repeats


def _stretches(
    nodes: Sequence[Node], source: Node, ends: Sequence[Values]
) -> Iterator[tuple[Values, Values, int | None]]:
    """What blocks begin and end with, and the number of the experts behind them.

    A layer is parted at its experts; what it does behind them joins the next one's beginning.
    """
    starts: Values = (source,)
    for end in ends:
        needed = _between(end, starts)
        for experts in nodes:
            if experts in needed and experts.target is EXPERTS:
                states, shares, index, number, _ = experts.args
                rest = _beside(nodes, source, experts)
                yield starts, (states, shares, index, *rest), number
                starts = (experts, *rest)
        if starts[0].target is not EXPERTS or end is ends[-1]:
            yield starts, end, None
            starts = end


def _beside(nodes: Sequence[Node], source: Node, experts: Node) -> Values:
    """What passes by some experts: needed behind them, and computed without these and later ones."""
    behind = reached(node for node in nodes[nodes.index(experts) :] if node.target is EXPERTS)
    before = reached([source]) - behind
    return tuple(node for node in nodes if node in before and behind.intersection(node.users) - {experts})


def _between(ends: Values, starts: Values) -> set[Node]:
    """What is computed of `starts` on the way to `ends`, with all that it needs besides."""
    found: set[Node] = set()
    ahead = list(ends)
    while ahead:
        node = ahead.pop()
        if node not in starts and node not in found:
            found.add(node)
            ahead.extend(node.all_input_nodes)
    return found


def _frozen_shapes(ends: Values, starts: Values, adapter: Collection[str]) -> tuple[Any, ...]:
    """Shapes of the weights that a stretch reads, but for those of an adapter, in the order of their use."""
    needed = _between(ends, starts)
    by_adapter = {node for node in needed if node.op == "placeholder" and str(node.target) in adapter}
    shapes = []
    for node in ends[0].graph.nodes:
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
        if user.target in (aten.reshape.default, aten.view.default):
            ahead.extend(user.users)
    return found


def _last_of_blocks(shapes: Sequence[Any], has_head: bool) -> tuple[list[int], bool]:
    """The last stretches of blocks: of the longest run of a shortest period, and of what is around it; and
    whether there is one.

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
        return sorted({0, max(0, count - 1 - has_head), count - 1}), False
    ends = [start - 1] if start else []
    ends += range(start + period - 1, start + covered, period)
    return ([*ends, count - 1] if ends[-1] < count - 1 else list(ends)), True


def _block(
    graph_module: GraphModule,
    starts: Values,
    ends: Values,
    adapter: Collection[str],
    table: Any,
    is_first: bool,
    sizes: tuple[int, int],
) -> ModelBlock:
    needed = _between(ends, starts)
    graph = Graph()
    values: dict[Node, Node] = {}

    def placeholder(node: Node, name: str) -> None:
        values[node] = graph.placeholder(name)
        values[node].meta["val"] = node.meta["val"]

    order = [node for node in graph_module.graph.nodes if node in needed]
    given = [node for node in order if node.op == "placeholder"]
    tables: dict[int, Node] = {}
    rows, tokens = sizes
    is_packed = len(starts) > 1 or starts[0].target is EXPERTS
    if not is_packed:
        placeholder(starts[0], str(starts[0].target) if is_first else STATE)
    else:
        width = sum(each.meta["val"].numel() for each in starts) // (rows * tokens)
        state = graph.placeholder(STATE)
        state.meta["val"] = torch.empty(rows, tokens, width, device="meta")
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
    if is_packed:
        values |= _taken_apart(state, starts, sizes)
    for node in order:
        if node not in values and node.op != "get_attr":
            for weight in node.all_input_nodes:
                if weight.op == "get_attr" and weight not in values:
                    values[weight] = graph.node_copy(weight)
            values[node] = graph.node_copy(node, values.__getitem__)
    answers = [values[end] for end in ends]
    graph.output((answers[0] if len(ends) == 1 else _side_by_side(answers, sizes),))
    return replace(whole_block(as_module(graph_module, graph)), tables=tuple(tables), adapter=trained)


def whole_block(graph_module: GraphModule) -> ModelBlock:
    """A graph that is a block as it is, without tables and adapter."""
    graph = graph_module.graph
    weights = tuple(dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr"))
    return ModelBlock(graph_module, weights, (), (), _signature(graph_module, graph))


def _side_by_side(values: Sequence[Node], sizes: tuple[int, int]) -> Node:
    """One state [rows, tokens, width] of several values, in their graph."""
    parts = []
    for value in values:
        order, shape = _tokens_first(value, sizes)
        turned = _call(aten.permute.default, value, order) if order != sorted(order) else value
        parts.append(_call(aten.reshape.default, turned, [*sizes, prod(shape[2:])]))
    return _call(aten.cat.default, parts, 2)


def _taken_apart(state: Node, values: Sequence[Node], sizes: tuple[int, int]) -> dict[Node, Node]:
    """The values that a state was made of."""
    found: dict[Node, Node] = {}
    start = 0
    for value in values:
        order, shape = _tokens_first(value, sizes)
        end = start + prod(shape[2:])
        part = _call(aten.slice.Tensor, state, 2, start, end)
        if len(order) < len(shape):
            found[value] = _call(aten.reshape.default, part, [*value.meta["val"].shape])
        else:
            part = _call(aten.reshape.default, part, shape)
            found[value] = _call(aten.permute.default, part, [order.index(dim) for dim in range(len(order))])
        start = end
    return found


def _tokens_first(value: Node, sizes: tuple[int, int]) -> tuple[list[int], list[int]]:
    """The order of dimensions with rows and tokens in front, and the shape that it gives."""
    shape = list(value.meta["val"].shape)
    if shape[0] == prod(sizes):
        return list(range(len(shape))), [*sizes, *shape[1:]]
    first = [shape.index(size) for size in sizes]
    order = [*first, *(dim for dim in range(len(shape)) if dim not in first)]
    return order, [shape[dim] for dim in order]


def _call(target: Any, *arguments: Any) -> Node:
    """A call that knows its value."""
    first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
    node: Node = first.graph.call_function(target, arguments)
    node.meta["val"] = target(*map_arg(arguments, lambda each: without_memory(each.meta["val"])))
    return node


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
