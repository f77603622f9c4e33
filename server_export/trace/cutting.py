"""Cut a model's graph into blocks where a single value is live, and group the blocks by type.

    embedding   tokens -> hidden states
    block       hidden states -> hidden states
    head        hidden states -> output

The cuts are found in the graph, not in the model's code. Stretches between cuts that repeat, such as
attention and the MLP after it, are one block. Everything before the first of these is the embedding,
everything after the last one the head. Blocks with the same operators and shapes have the same type, whatever
weights, tables and adapters they read.

Where several values are live, the layers are the blocks, and server_export/trace/layers.py determines what
crosses their boundaries. Layers are split at their experts, which are blocks of their own; see
server_export/trace/experts.py.
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
from server_export.ir.traversal import ancestors, descendants, readers
from server_export.trace.experts import split_at_experts
from server_export.trace.layers import Stretch, Values, ends_of_layers, stretches_of_layers

_STATE_DIMENSIONS = 3
# An embedding, one block and a head.
_MIN_BLOCKS = 3
aten = torch.ops.aten


@dataclass(frozen=True)
class ModelBlock(Block):
    """A block of a model, with the meaning of its ports in the model.

    Blocks of one type use their weights in the same order.

    Attributes:
        signature: equal for blocks that compute the same function of their inputs and weights.
        tables: indices of the model's tables, by the index of their ports.
        modules: names of the adapted layers, by the index of their matrices' ports.
        shared_in, shared_out: numbers of the model's shared values f32 [rows, tokens, width], by the index of
            their ports.
        experts: the number of the layer whose experts follow the block.
        is_expert: whether the block is an expert.
    """

    signature: tuple[Any, ...] = ()
    tables: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    shared_in: tuple[int, ...] = ()
    shared_out: tuple[int, ...] = ()
    experts: int | None = None
    is_expert: bool = False


def cut(graph_module: GraphModule, adapter: Mapping[str, Matrix], table: Any) -> list[ModelBlock]:
    """Return the blocks of a model's graph in order; a graph without a place to cut is one block.

    Args:
        graph_module: all blocks depend on its first placeholder; its nodes have `meta["val"]`.
        adapter: matrices of the adapter by placeholder.
        table: the operator that stands for a table; its first argument is the index of the table.
    """
    nodes = list(graph_module.graph.nodes)
    (output,) = (node for node in nodes if node.op == "output")
    source = next(node for node in nodes if node.op == "placeholder")
    flow = descendants([source])
    result = output.args[0][0]
    stretches = stretches_of_layers(nodes, flow, result) or _cut_at_single_values(
        nodes, flow, source, result, adapter
    )
    if len(stretches) < _MIN_BLOCKS:
        stretches = stretches_of_layers([*graph_module.graph.nodes], flow, result, all_read=True) or stretches
    stretches = [*split_at_experts(list(graph_module.graph.nodes), flow, stretches)]
    shared_values = [value for stretch in stretches for value in stretch.shared_out]
    number_of = {value: number for number, value in enumerate(shared_values)}
    blocks = [_block(graph_module, stretch, adapter, table, source, number_of) for stretch in stretches]
    # Blocks after the first adapted one get inputs that depend on the adapter, so they need other
    # derivatives.
    first_adapted = next((number for number, block in enumerate(blocks) if block.modules), len(blocks))
    is_adapted = [number >= first_adapted for number, block in enumerate(blocks) for _ in block.shared_out]
    return [_mark_differentiable(block, [is_adapted[value] for value in block.shared_in]) for block in blocks]


def _mark_differentiable(block: ModelBlock, is_differentiable: Sequence[bool]) -> ModelBlock:
    """Return the block with ports that say which shared inputs depend on the adapter."""
    for port, node in block.inputs.items():
        if port.value == SHARED_IN and port.index is not None:
            node.meta[PORT] = replace(port, is_differentiable=is_differentiable[port.index])
    return replace(block, signature=(tuple(is_differentiable), *block.signature))


def _cut_at_single_values(
    nodes: Sequence[Node], flow: set[Node], source: Node, result: Node, adapter: Collection[str]
) -> list[Stretch]:
    cuts = [node for node in _single_live_values(nodes, source, flow) if node is not result]
    # Logits are the only live value too, but no head starts after them.
    while cuts and not _frozen_shapes(result, cuts[-1], adapter):
        cuts.pop()
    stretches = list(zip([source, *cuts], [*cuts, result], strict=True))
    shapes = [_frozen_shapes(end, start, adapter) for start, end in stretches]
    has_head = result.target is SOFTMAX_PARTS
    adapted = [_is_adapted(end, start, adapter) for start, end in stretches]
    last_stretches = _separate_adapted(_last_stretches(shapes, has_head), adapted, has_head)
    ends = [stretches[number][1] for number in last_stretches]
    by_layer = _ends_at_layers(nodes, cuts)
    if not {*by_layer} <= {*ends}:
        # For example a model that alternates attention and recurrences.
        ends = [*by_layer, result]
    return [Stretch((start,), (end,)) for start, end in zip([source, *ends[:-1]], ends, strict=True)]


def _ends_at_layers(nodes: Sequence[Node], cuts: Sequence[Node]) -> list[Node]:
    """Return the cuts where the embedding and each layer end, or none if a layer ends where no cut is."""
    indices = ends_of_layers(nodes)
    first = indices[0] if indices else 0
    before = [node for node in cuts if node in nodes[: first + 1]]
    ends = [nodes[index] for index in indices[1:]]
    return [before[-1], *ends] if before and {*ends} <= {*cuts} else []


def block_types(blocks: Sequence[ModelBlock]) -> list[int]:
    """Return the type of each block: the number of the first block with the same signature."""
    first: dict[Any, int] = {}
    return [first.setdefault(block.signature, number) for number, block in enumerate(blocks)]


def _single_live_values(nodes: Sequence[Node], source: Node, flow: set[Node]) -> list[Node]:
    """Return hidden states f32 [rows, tokens, width] that are the only live value of the flow."""
    index_of = {node: index for index, node in enumerate(nodes)}
    rows, tokens = source.meta["val"].shape
    ends: dict[int, int] = {}
    live, single_values = 0, []
    for index, node in enumerate(nodes):
        users = [index_of[user] for user in node.users] if node in flow else []
        if users:
            live += 1
            ends[max(users)] = ends.get(max(users), 0) + 1
        live -= ends.pop(index, 0)
        value = node.meta.get("val")
        if (
            live == 1
            and users
            and isinstance(value, torch.Tensor)
            and value.dtype == torch.float32
            and value.dim() == _STATE_DIMENSIONS
            and tuple(value.shape[:2]) == (rows, tokens)
        ):
            single_values.append(node)
    return single_values


def _frozen_shapes(end: Node, start: Node, adapter: Collection[str]) -> tuple[Any, ...]:
    """Return the shapes of the frozen weights that a stretch reads, in order of use."""
    needed = ancestors([end], without=[start])
    by_adapter = {node for node in needed if node.op == "placeholder" and str(node.target) in adapter}
    shapes, reshapes = [], members(Category.RESHAPE)
    for node in end.graph.nodes:
        combined = {each for user in readers(node, reshapes) for each in user.all_input_nodes}
        if node in needed and not by_adapter & combined:
            shapes += [
                tuple(source.meta["val"].shape) for source in node.all_input_nodes if source.op == "get_attr"
            ]
    return tuple(shapes)


def _last_stretches(shapes: Sequence[Any], has_head: bool) -> list[int]:
    """Return the last stretch of each block, from the longest run of repetitions with the shortest period.

    Without repetitions, one block covers everything between the first stretch and the head, if the model has
    one.
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


def _separate_adapted(last: Sequence[int], adapted: Sequence[bool], has_head: bool) -> list[int]:
    """Return the last stretches of blocks such that neither the embedding nor the head has an adapter.

    Some models have a layer before or after the others that differs from them.
    """
    numbers = [number for number, is_adapted in enumerate(adapted) if is_adapted]
    before = [number - 1 for number in numbers if 0 < number <= last[0]]
    head = last[-2] if has_head and len(last) > 1 else last[-1]
    after = [number for number in numbers if head < number < last[-1]]
    return sorted({*last, *before[:1], *after[-1:]})


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
    nodes = [node for node in graph_module.graph.nodes if node in needed]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    matrices = {node: adapter[str(node.target)] for node in placeholders if str(node.target) in adapter}
    concatenated = []
    if stretch.starts == (source,):
        values[source] = new_input(graph, Port(TOKENS), source.meta["val"])
    else:
        concatenated.append(
            (packing.input(Port(HIDDEN_STATES, is_differentiable=True), stretch.starts), stretch.starts)
        )
    for node in placeholders:
        if node not in matrices:
            values[node] = new_input(graph, _port_of_model_input(node), node.meta["val"])
    table_inputs: dict[int, Node] = {}
    for node in nodes:
        if node.target is table:
            number = node.args[0]
            assert isinstance(number, int)
            if number not in table_inputs:
                table_inputs[number] = new_input(graph, Port(TABLE, len(table_inputs)), node.meta["val"])
            values[node] = table_inputs[number]
    for number, value_in in enumerate(stretch.shared_in):
        concatenated.append((packing.input(Port(SHARED_IN, number), (value_in,)), (value_in,)))
    modules = list(dict.fromkeys(matrix.module for matrix in matrices.values()))
    for node, matrix in matrices.items():
        value = LORA_A if matrix.letter == "a" else LORA_B
        port = Port(value, modules.index(matrix.module), is_differentiable=True)
        values[node] = new_input(graph, port, node.meta["val"])
    for whole, parts in concatenated:
        values |= packing.split(whole, parts)
    _copy(graph, nodes, values)
    (end, *_) = stretch.ends
    is_last = end in graph_module.graph.output_node().args[0]
    outputs = [values[end]] if is_last else [packing.concatenate(stretch.ends, values)]
    outputs += [packing.concatenate((value,), values) for value in stretch.shared_out]
    graph.output(tuple(outputs))
    shared_in, shared_out = (
        tuple(map(shared.__getitem__, each)) for each in (stretch.shared_in, stretch.shared_out)
    )
    output_value = PARTS if end.target is SOFTMAX_PARTS else HIDDEN_STATES
    return replace(
        whole_block(make_graph_module(graph_module, graph)),
        outputs=(
            Port(output_value, is_differentiable=True),
            *(Port(SHARED_OUT, n, is_differentiable=True) for n in range(len(shared_out))),
        ),
        tables=tuple(table_inputs),
        modules=tuple(modules),
        shared_in=shared_in,
        shared_out=shared_out,
        experts=stretch.experts,
    )


def _port_of_model_input(node: Node) -> Port:
    """Return the port of an input of the model's graph other than tokens and adapter."""
    if str(node.target) != "mask_or_targets":
        return Port(str(node.target))
    return Port(PADDING_MASK if node.meta["val"].is_floating_point() else TARGETS)


def _copy(graph: Graph, order: Sequence[Node], values: dict[Node, Node]) -> None:
    """Append nodes and the weights that they read to a graph, and add the copies to `values`."""
    for node in order:
        if node not in values and node.op != "get_attr":
            for weight in node.all_input_nodes:
                if weight.op == "get_attr" and weight not in values:
                    values[weight] = graph.node_copy(weight)
            values[node] = graph.node_copy(node, values.__getitem__)


def whole_block(graph_module: GraphModule) -> ModelBlock:
    """Return a graph as one block without tables and adapter; inputs without a port are hidden states."""
    graph = graph_module.graph
    for node in graph.find_nodes(op="placeholder"):
        node.meta.setdefault(PORT, Port(HIDDEN_STATES, is_differentiable=True))
    weights = tuple(dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr"))
    signature = _signature(graph_module, graph)
    return ModelBlock(graph_module, (Port(HIDDEN_STATES, is_differentiable=True),), weights, signature)


@dataclass(frozen=True)
class _Packing:
    """Concatenates values of a model to f32 [rows, tokens, width] in the graph of a block, or splits them."""

    graph: Graph
    sizes: tuple[int, ...]

    def input(self, port: Port, values: Values) -> Node:
        """Add an input with the concatenation of some values."""
        width = sum(value.meta["val"].numel() for value in values) // prod(self.sizes)
        return new_input(self.graph, port, torch.empty(*self.sizes, width, device="meta"))

    def concatenate(self, values: Values, copies: Mapping[Node, Node]) -> Node:
        """Concatenate the copies of some values."""
        parts = []
        for value in values:
            order, shape = self._rows_and_tokens_first(value)
            permuted = self._call(aten.permute.default, copies[value], order)
            parts.append(self._call(aten.reshape.default, permuted, [*self.sizes, prod(shape[2:])]))
        return parts[0] if len(parts) == 1 else self._call(aten.cat.default, parts, 2)

    def split(self, whole: Node, values: Values) -> dict[Node, Node]:
        """Split a concatenation into the values."""
        split_values: dict[Node, Node] = {}
        start = 0
        for value in values:
            order, shape = self._rows_and_tokens_first(value)
            model_shape = [*value.meta["val"].shape]
            end = start + prod(shape[2:])
            part = whole if len(values) == 1 else self._call(aten.slice.Tensor, whole, 2, start, end)
            part = self._call(aten.reshape.default, part, shape if len(shape) == len(order) else model_shape)
            split_values[value] = self._call(
                aten.permute.default, part, [order.index(dim) for dim in range(len(order))]
            )
            start = end
        return split_values

    def _rows_and_tokens_first(self, value: Node) -> tuple[list[int], list[int]]:
        """Return the permutation that puts rows and tokens first, and the resulting shape."""
        shape = list(value.meta["val"].shape)
        if shape[0] == prod(self.sizes):
            return list(range(len(shape))), [*self.sizes, *shape[1:]]
        first = [shape.index(size) for size in self.sizes]
        order = [*first, *(dim for dim in range(len(shape)) if dim not in first)]
        return order, [shape[dim] for dim in order]

    def _call(self, target: Any, source: Any, argument: Any, *more: Any) -> Node:
        """Write an operator, unless it is a permutation or reshape that changes nothing."""
        value = source.meta["val"] if isinstance(source, Node) else None
        is_same = value is not None and argument == [*value.shape] and target is aten.reshape.default
        if is_same or (target is aten.permute.default and argument == sorted(argument)):
            return source
        arguments = (source, argument, *more)
        node: Node = self.graph.call_function(target, arguments)
        node.meta["val"] = target(*map_arg(arguments, lambda each: to_meta(each.meta["val"])))
        return node


def _signature(graph_module: GraphModule, graph: Graph) -> tuple[Any, ...]:
    """Return a value that is equal exactly for graphs that compute the same of their inputs and weights."""
    numbers: dict[Node, int] = {}
    weights: dict[str, int] = {}
    lines: list[tuple[Any, ...]] = []
    for node in graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "get_attr":
            tensor = get_attribute(graph_module, str(node.target))
            position = weights.setdefault(str(node.target), len(weights))
            lines.append(("weight", position, tuple(tensor.shape), tensor.dtype))
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
