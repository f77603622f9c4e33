"""Encoders whose tokens read those beside them: a row that is moved becomes a product with a table.

    pad(x[:, 1:])      each token's next
    convolution        the sum of a token and its neighbours, each with a tap of its own
    im2col             a token and its neighbours side by side
    x[:, 0]            the first token, as heads of classes read it

Behind a row is nothing. So padding is made nothing first: a row means what it means alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from server_export.ir.writer import GraphWriter
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.patterns.convolutions import convolution_of
from server_export.trace.tables import ModelTable, ModelTables, asked

aten = torch.ops.aten
# That XNNPACK lays side by side.
_MOST_PARTS = 4


def write_neighbours(graph: ModelGraph) -> None:
    """Rewrite what moves the rows of an encoder, in place; `beside` is its padding [rows, 1, 1, tokens]."""
    graph_module = graph.graph_module
    (beside,) = (node for node in graph_module.graph.find_nodes(op="placeholder") if node.name == "beside")
    writer, moving = GraphWriter(graph_module), _Moving(beside, graph.tables)
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and (write := _RULES.get(node.target)) is not None:
            writer.replace(node, write, moving, node)
    graph_module.graph.eliminate_dead_code()


class _Moving:
    """What moves rows of states."""

    def __init__(self, beside: Node, tables: ModelTables) -> None:
        self._beside, self.tables = beside, tables
        self.tokens = int(beside.meta["val"].shape[-1])

    def all_of(self, writer: GraphWriter, source: Node, places: range, node: Node) -> list[Node]:
        """Of f32 [rows, width, tokens], the token so many places behind each; for each of some places."""
        if places == range(1):
            return [source]
        rows, width, tokens = source.meta["val"].shape
        ones = writer.call(aten.relu.default, writer.plus(self._beside, 1.0))
        kept = writer.times(source, writer.reshape(ones, [rows, 1, tokens]))
        flat = writer.reshape(kept, [1, rows * width, tokens])
        found = []
        for place in places:
            if place:
                table = ModelTable("behind", 1, abs(place))
                key, shape = ("behind", abs(place), 1), [1, tokens, tokens]
                relation = asked(node, self.tables, key, table, shape, torch.float32)
                if place < 0:
                    relation = writer.call(aten.transpose.int, relation, 1, 2)
                moved = writer.call(aten.bmm.default, flat, relation)
                found.append(writer.reshape(moved, [rows, width, tokens]))
            else:
                found.append(kept)
        return found


def _padded(writer: GraphWriter, moving: _Moving, node: Any) -> Node | None:
    """A part of all rows, and nothing in the place of the rest."""
    part, pads, *fill = node.args
    shape = list(node.meta["val"].shape)
    if part.target is not aten.slice.Tensor or len(shape) != 3 or shape[1] != moving.tokens:
        return None
    source, dim, start = (*part.args, 0, 0)[:3]
    before, behind = pads[2:4] if len(pads) > 3 else (0, 0)
    missing = moving.tokens - part.meta["val"].shape[1]
    places = {(missing, 0, missing): missing, (0, missing, 0): -missing}
    is_nothing = all(each in ("constant", None, 0) for each in fill)
    if dim != 1 or not is_nothing or any(pads[:2]) or any(pads[4:]) or (start, before, behind) not in places:
        return None
    place = places[start, before, behind]
    turned = writer.call(aten.permute.default, source, [0, 2, 1])
    (moved,) = moving.all_of(writer, turned, range(place, place + 1), node)
    return writer.call(aten.permute.default, moved, [0, 2, 1])


def _convolved(writer: GraphWriter, moving: _Moving, node: Any) -> Node | None:
    """Taps for each number alone, or layers of all numbers of a token."""
    source, weight, bias, stride, padding, dilation, groups = convolution_of(node)
    out, part, *sizes = weight.meta["val"].shape
    if len(sizes) == 2 and sizes[1] == 1:
        return _convolved_by_heads(writer, moving, node)
    if len(sizes) != 1:
        return None
    taps = sizes[0]
    half = taps // 2
    is_centred = taps % 2 == 1 and (*stride, *padding, *dilation) == (1, half, 1)
    if not is_centred or source.meta["val"].shape[-1] != moving.tokens or groups not in (1, out):
        return None
    answer = None
    for tap, moved in enumerate(moving.all_of(writer, source, range(-half, taps - half), node)):
        own = writer.call(aten.select.int, weight, 2, tap)
        if groups == 1:
            turned = writer.call(aten.permute.default, moved, [0, 2, 1])
            layer = writer.call(aten.linear.default, turned, own)
            term = writer.call(aten.permute.default, layer, [0, 2, 1])
        elif part == 1:
            term = writer.times(moved, own)
        else:
            return None
        answer = term if answer is None else writer.plus(answer, term)
    return answer if bias is None or answer is None else writer.plus(answer, writer.reshape(bias, [out, 1]))


def _convolved_by_heads(writer: GraphWriter, moving: _Moving, node: Any) -> Node | None:
    """Taps for each head [rows, heads, tokens, width] alone."""
    source, weight, bias, stride, padding, dilation, *_, groups = node.args
    rows, heads, tokens, width = source.meta["val"].shape
    taps = weight.meta["val"].shape[2]
    half = taps // 2
    is_centred = taps % 2 == 1 and (*stride, *padding, *dilation) == (1, 1, half, 0, 1, 1)
    if bias is not None or not is_centred or tokens != moving.tokens or groups != heads:
        return None
    turned = writer.call(aten.permute.default, source, [0, 1, 3, 2])
    line = writer.reshape(turned, [rows, heads * width, tokens])
    answer = None
    for tap, moved in enumerate(moving.all_of(writer, line, range(-half, taps - half), node)):
        own = writer.call(aten.select.int, weight, 2, tap)
        term = writer.times(writer.reshape(moved, [rows, heads, width, tokens]), own)
        answer = term if answer is None else writer.plus(answer, term)
    return None if answer is None else writer.call(aten.permute.default, answer, [0, 1, 3, 2])


def _side_by_side(writer: GraphWriter, moving: _Moving, node: Any) -> Node | None:
    source, (taps, other), *more = node.args
    rows, width, tokens, one = source.meta["val"].shape
    half = taps // 2
    if (tokens, one, other, taps % 2, more) != (moving.tokens, 1, 1, 1, [[1, 1], [half, 0], [1, 1]]):
        return None
    line = writer.reshape(source, [rows, width, tokens])
    parts = [
        writer.reshape(moved, [rows, width, 1, tokens])
        for moved in moving.all_of(writer, line, range(-half, taps - half), node)
    ]
    while len(parts) > 1:
        groups = [parts[start : start + _MOST_PARTS] for start in range(0, len(parts), _MOST_PARTS)]
        parts = [writer.call(aten.cat.default, group, 2) if group[1:] else group[0] for group in groups]
    return writer.reshape(parts[0], [rows, width * taps, tokens])


def _first(writer: GraphWriter, moving: _Moving, node: Any) -> Node | None:
    """The first token of f32 [rows, tokens, width]: how many come behind it would be in the way back."""
    source, dim, *bounds = node.args
    value = source.meta["val"]
    is_first = bounds == [0] if node.target is aten.select.int else bounds == [0, 1]
    if value.dtype != torch.float32 or value.dim() != 3 or (dim, is_first) != (1, True):
        return None
    rows, tokens, _ = value.shape
    if tokens != moving.tokens:
        return None
    table = ModelTable("behind", 1)
    itself = asked(node, moving.tables, ("behind", 0, 1), table, [1, tokens, tokens], torch.float32)
    place = writer.call(
        aten.expand.default, writer.call(aten.slice.Tensor, itself, 1, 0, 1), [rows, 1, tokens]
    )
    return writer.reshape(writer.call(aten.bmm.default, place, source), node.meta["val"].shape)


_RULES: dict[Any, Callable[[GraphWriter, _Moving, Node], Node | None]] = {
    aten.select.int: _first,
    aten.slice.Tensor: _first,
    aten.constant_pad_nd.default: _padded,
    aten.pad.default: _padded,
    aten.convolution.default: _convolved,
    aten.conv1d.default: _convolved,
    aten.conv2d.default: _convolved,
    aten.im2col.default: _side_by_side,
}


register(
    Pattern(
        "neighbours",
        serves="encoders whose tokens read those beside them, or the first token",
        model_types=("bert", "convbert", "funnel", "mobilebert", "nystromformer", "roberta"),
        example="convbert",
        rewrites=(Rewrite(write_neighbours, operators=tuple(_RULES), of="encoder"),),
    )
)
