"""A model's graph, cut into blocks where one value alone is alive, and the types of these blocks.

    embedding   tokens -> state        block   state -> state        head   state -> answer

The points are found in the graph, not in the model's code. Stretches between them that come again and again,
such as attention and what follows it, are one block. What is before the first of these is the embedding,
what is after the last one the head. Blocks of the same operators and shapes are of one type, whatever
weights they read, and whatever tables and adapters they are given.

Where several values are alive, layers are blocks; server_export/trace/layers.py tells what crosses. A layer
is parted at its experts, which are blocks of their own; server_export/trace/experts.py tells where.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from prge.formats.signatures import (
    HIDDEN_STATES,
    LORA_A,
    LORA_B,
    PADDING_MASK,
    PARTS,
    SHARED_IN,
    SHARED_OUT,
    TABLE,
    TARGETS,
    TOKENS,
    Port,
)
from prge.model_spec import Matrix
from server_export.ir.block import PORT, Block, new_input
from server_export.ir.modules import get_attribute, make_graph_module
from server_export.ir.operators import Category, members
from server_export.ir.shapes import to_meta
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.ir.walks import ancestors, descendants, readers
from server_export.trace.experts import parted_at_experts
from server_export.trace.layers import Stretch, Values, ends_of_layers, of_layers

_STATE_DIMENSIONS = 3
# Of a model that is cut: an embedding, a block, and what is behind.
_LEAST = 3
aten = torch.ops.aten


@dataclass(frozen=True)
class ModelBlock(Block):
    """A block of a model, and what its ports are in the model.

    Blocks of one type use their weights in the same order.

    Attributes:
        signature: equal for blocks that compute the same of their inputs and weights.
        tables: numbers of the model's tables by the index of their ports.
        modules: names of the adapted layers by the index of their matrices' ports.
        shared_in, shared_out: numbers of the model's shared values f32 [rows, tokens, width] by the index of their
            ports.
        experts: the number of the layer whose experts come after the block.
        is_expert: whether it is one of a layer's experts.
    """

    signature: tuple[Any, ...] = ()
    tables: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    shared_in: tuple[int, ...] = ()
    shared_out: tuple[int, ...] = ()
    experts: int | None = None
    is_expert: bool = False


def cut(graph_module: GraphModule, adapter: Mapping[str, Matrix], table: Any) -> list[ModelBlock]:
    """The blocks of a model's graph in order; a graph without points to cut at is one block.

    Args:
        graph_module: its first placeholder is what all blocks depend on; its nodes carry `meta["val"]`.
        adapter: matrices of the adapter by their placeholders.
        table: the operator that stands for a table; its first argument is its number.
    """
    nodes = list(graph_module.graph.nodes)
    (output,) = (node for node in nodes if node.op == "output")
    source = next(node for node in nodes if node.op == "placeholder")
    flow = descendants([source])
    answer = output.args[0][0]
    stretches = of_layers(nodes, flow, answer) or _where_one_is_alive(nodes, flow, source, answer, adapter)
    if len(stretches) < _LEAST:
        stretches = of_layers([*graph_module.graph.nodes], flow, answer, all_read=True) or stretches
    stretches = [*parted_at_experts(list(graph_module.graph.nodes), flow, stretches)]
    given = [value for stretch in stretches for value in stretch.shared_out]
    shared = {value: number for number, value in enumerate(given)}
    blocks = [_block(graph_module, stretch, adapter, table, source, shared) for stretch in stretches]
    # A block that takes what no adapter changes computes other derivatives.
    lowest = next((number for number, block in enumerate(blocks) if block.modules), len(blocks))
    changes = [number >= lowest for number, block in enumerate(blocks) for _ in block.shared_out]
    return [_with_changes(block, [changes[value] for value in block.shared_in]) for block in blocks]


def _with_changes(block: ModelBlock, changes: Sequence[bool]) -> ModelBlock:
    """The block whose ports say which of the values that it takes an adapter may change."""
    for port, node in block.inputs.items():
        if port.value == SHARED_IN and port.index is not None:
            node.meta[PORT] = replace(port, is_differentiable=changes[port.index])
    return replace(block, signature=(tuple(changes), *block.signature))


def _where_one_is_alive(
    nodes: Sequence[Node], flow: set[Node], source: Node, answer: Node, adapter: Collection[str]
) -> list[Stretch]:
    points = [point for point in _points(nodes, source, flow) if point is not answer]
    # Logits are alone alive too, and no head begins behind them.
    while points and not _frozen_shapes(answer, points[-1], adapter):
        points.pop()
    stretches = list(zip([source, *points], [*points, answer], strict=True))
    shapes = [_frozen_shapes(end, start, adapter) for start, end in stretches]
    has_head = answer.target is SOFTMAX_PARTS
    adapted = [_is_adapted(end, start, adapter) for start, end in stretches]
    last = _with_adapted(_last_of_blocks(shapes, has_head), adapted, has_head)
    ends = [stretches[number][1] for number in last]
    by_layer = _at_layers(nodes, points)
    if not {*by_layer} <= {*ends}:
        # As where attention and a recurrence take turns.
        ends = [*by_layer, answer]
    return [Stretch((start,), (end,)) for start, end in zip([source, *ends[:-1]], ends, strict=True)]


def _at_layers(nodes: Sequence[Node], points: Sequence[Node]) -> list[Node]:
    """The points where the embedding and the model's layers end; none if a layer ends at no point."""
    places = ends_of_layers(nodes)
    first = places[0] if places else 0
    before = [point for point in points if point in nodes[: first + 1]]
    ends = [nodes[place] for place in places[1:]]
    return [before[-1], *ends] if before and {*ends} <= {*points} else []


def block_types(blocks: Sequence[ModelBlock]) -> list[int]:
    """The number of each block's type: that of the first block of the same signature."""
    first: dict[Any, int] = {}
    return [first.setdefault(block.signature, number) for number, block in enumerate(blocks)]


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


def _frozen_shapes(end: Node, start: Node, adapter: Collection[str]) -> tuple[Any, ...]:
    """Shapes of the weights that a stretch reads, but for those of an adapter, in the order of their use."""
    needed = ancestors([end], without=[start])
    by_adapter = {node for node in needed if node.op == "placeholder" and str(node.target) in adapter}
    shapes, reshapes = [], members(Category.RESHAPE)
    for node in end.graph.nodes:
        met = {each for user in readers(node, reshapes) for each in user.all_input_nodes}
        if node in needed and not by_adapter & met:
            shapes += [tuple(n.meta["val"].shape) for n in node.all_input_nodes if n.op == "get_attr"]
    return tuple(shapes)


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


def _is_adapted(end: Node, start: Node, adapter: Collection[str]) -> bool:
    needed = ancestors([end], without=[start])
    return any(node.op == "placeholder" and str(node.target) in adapter for node in needed)


def _with_adapted(last: Sequence[int], adapted: Sequence[bool], has_head: bool) -> list[int]:
    """The last stretches of blocks, where neither the embedding nor the head has an adapter in it.

    Some models have a layer before or after the others that isn't like them.
    """
    numbers = [number for number, is_adapted in enumerate(adapted) if is_adapted]
    before = [number - 1 for number in numbers if 0 < number <= last[0]]
    head = last[-2] if has_head and len(last) > 1 else last[-1]
    behind = [number for number in numbers if head < number < last[-1]]
    return sorted({*last, *before[:1], *behind[-1:]})


def _block(
    graph_module: GraphModule,
    stretch: Stretch,
    adapter: Mapping[str, Matrix],
    table: Any,
    source: Node,
    shared: Mapping[Node, int],
) -> ModelBlock:
    needed = ancestors([*stretch.ends, *stretch.shared_out], without=[*stretch.starts, *stretch.shared_in])
    graph = Graph()
    values: dict[Node, Node] = {}
    packing = _Packing(graph, tuple(source.meta["val"].shape))
    order = [node for node in graph_module.graph.nodes if node in needed]
    given = [node for node in order if node.op == "placeholder"]
    trained = {node: adapter[str(node.target)] for node in given if str(node.target) in adapter}
    packed = []
    if stretch.starts == (source,):
        values[source] = new_input(graph, Port(TOKENS), source.meta["val"])
    else:
        packed.append(
            (packing.input(Port(HIDDEN_STATES, is_differentiable=True), stretch.starts), stretch.starts)
        )
    for node in given:
        if node not in trained:
            values[node] = new_input(graph, _own_port(node), node.meta["val"])
    tables: dict[int, Node] = {}
    for node in order:
        if node.target is table:
            number = node.args[0]
            assert isinstance(number, int)
            if number not in tables:
                tables[number] = new_input(graph, Port(TABLE, len(tables)), node.meta["val"])
            values[node] = tables[number]
    for number, taken in enumerate(stretch.shared_in):
        packed.append((packing.input(Port(SHARED_IN, number), (taken,)), (taken,)))
    modules = list(dict.fromkeys(matrix.module for matrix in trained.values()))
    for node, matrix in trained.items():
        value = LORA_A if matrix.letter == "a" else LORA_B
        port = Port(value, modules.index(matrix.module), is_differentiable=True)
        values[node] = new_input(graph, port, node.meta["val"])
    for whole, parts in packed:
        values |= packing.taken_apart(whole, parts)
    _copy(graph, order, values)
    (end, *_) = stretch.ends
    is_last = end in graph_module.graph.output_node().args[0]
    answers = [values[end]] if is_last else [packing.side_by_side(stretch.ends, values)]
    answers += [packing.side_by_side((value,), values) for value in stretch.shared_out]
    graph.output(tuple(answers))
    shared_in, shared_out = (
        tuple(map(shared.__getitem__, each)) for each in (stretch.shared_in, stretch.shared_out)
    )
    answer = PARTS if end.target is SOFTMAX_PARTS else HIDDEN_STATES
    return replace(
        whole_block(make_graph_module(graph_module, graph)),
        outputs=(
            Port(answer, is_differentiable=True),
            *(Port(SHARED_OUT, n, is_differentiable=True) for n in range(len(shared_out))),
        ),
        tables=tuple(tables),
        modules=tuple(modules),
        shared_in=shared_in,
        shared_out=shared_out,
        experts=stretch.experts,
    )


def _own_port(node: Node) -> Port:
    """The port of what a model's graph takes besides its tokens and its adapter."""
    if str(node.target) != "beside":
        return Port(str(node.target))
    return Port(PADDING_MASK if node.meta["val"].is_floating_point() else TARGETS)


def _copy(graph: Graph, order: Sequence[Node], values: dict[Node, Node]) -> None:
    """Copy what computes values, and the weights it reads, behind a graph; `values` has it afterwards."""
    for node in order:
        if node not in values and node.op != "get_attr":
            for weight in node.all_input_nodes:
                if weight.op == "get_attr" and weight not in values:
                    values[weight] = graph.node_copy(weight)
            values[node] = graph.node_copy(node, values.__getitem__)


def whole_block(graph_module: GraphModule) -> ModelBlock:
    """A graph that is a block as it is, without tables and adapter; an input without a port is its state."""
    graph = graph_module.graph
    for node in graph.find_nodes(op="placeholder"):
        node.meta.setdefault(PORT, Port(HIDDEN_STATES, is_differentiable=True))
    weights = tuple(dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr"))
    signature = _signature(graph_module, graph)
    return ModelBlock(graph_module, (Port(HIDDEN_STATES, is_differentiable=True),), weights, signature)


@dataclass(frozen=True)
class _Packing:
    """Values of a model side by side, f32 [rows, tokens, width], in the graph of a block."""

    graph: Graph
    sizes: tuple[int, ...]

    def input(self, port: Port, values: Values) -> Node:
        """An input of some values."""
        width = sum(value.meta["val"].numel() for value in values) // prod(self.sizes)
        return new_input(self.graph, port, torch.empty(*self.sizes, width, device="meta"))

    def side_by_side(self, values: Values, copies: Mapping[Node, Node]) -> Node:
        """What is made of the copies of some values."""
        parts = []
        for value in values:
            order, shape = self._tokens_first(value)
            turned = self._call(aten.permute.default, copies[value], order)
            parts.append(self._call(aten.reshape.default, turned, [*self.sizes, prod(shape[2:])]))
        return parts[0] if len(parts) == 1 else self._call(aten.cat.default, parts, 2)

    def taken_apart(self, whole: Node, values: Values) -> dict[Node, Node]:
        """The values that an input was made of."""
        found: dict[Node, Node] = {}
        start = 0
        for value in values:
            order, shape = self._tokens_first(value)
            known = [*value.meta["val"].shape]
            end = start + prod(shape[2:])
            part = whole if len(values) == 1 else self._call(aten.slice.Tensor, whole, 2, start, end)
            part = self._call(aten.reshape.default, part, shape if len(shape) == len(order) else known)
            found[value] = self._call(
                aten.permute.default, part, [order.index(dim) for dim in range(len(order))]
            )
            start = end
        return found

    def _tokens_first(self, value: Node) -> tuple[list[int], list[int]]:
        """The order of dimensions with rows and tokens in front, and the shape that it gives."""
        shape = list(value.meta["val"].shape)
        if shape[0] == prod(self.sizes):
            return list(range(len(shape))), [*self.sizes, *shape[1:]]
        first = [shape.index(size) for size in self.sizes]
        order = [*first, *(dim for dim in range(len(shape)) if dim not in first)]
        return order, [shape[dim] for dim in order]

    def _call(self, target: Any, source: Any, argument: Any, *more: Any) -> Node:
        """A change of order or shape, if it changes anything, or another call."""
        value = source.meta["val"] if isinstance(source, Node) else None
        is_same = value is not None and argument == [*value.shape] and target is aten.reshape.default
        if is_same or (target is aten.permute.default and argument == sorted(argument)):
            return source
        arguments = (source, argument, *more)
        node: Node = self.graph.call_function(target, arguments)
        node.meta["val"] = target(*map_arg(arguments, lambda each: to_meta(each.meta["val"])))
        return node


def _signature(graph_module: GraphModule, graph: Graph) -> tuple[Any, ...]:
    """What two graphs have in common exactly if they compute the same of their inputs and weights."""
    numbers: dict[Node, int] = {}
    weights: dict[str, int] = {}
    lines: list[tuple[Any, ...]] = []
    for node in graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "get_attr":
            tensor = get_attribute(graph_module, str(node.target))
            place = weights.setdefault(str(node.target), len(weights))
            lines.append(("weight", place, tuple(tensor.shape), tensor.dtype))
        elif node.op == "placeholder":
            lines.append(("input", node.meta[PORT], tuple(node.meta["val"].shape), node.meta["val"].dtype))
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
