"""Encoders whose tokens read neighbouring tokens: shifts of a row become products with a table.

    pad(x[:, 1:])      the next token
    convolution        a weighted sum of a token and its neighbours
    im2col             a token and its neighbours, concatenated
    x[:, 0]            the first token, which classification heads read

Beyond the end of a row there are zeros. Padding is set to zero first, so the result for a row doesn't depend
on the padding of its batch.
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
from server_export.trace.tables import ModelTable, ModelTables, insert_table

aten = torch.ops.aten
# Maximum number of parts that XNNPACK concatenates.
_LARGEST_CAT = 4


def write_neighbours(graph: ModelGraph) -> None:
    """Write shifts of an encoder's rows as products with tables, in place.

    The placeholder `mask_or_targets` is the padding mask [rows, 1, 1, tokens].
    """
    graph_module = graph.graph_module
    (mask_or_targets,) = (
        node for node in graph_module.graph.find_nodes(op="placeholder") if node.name == "mask_or_targets"
    )
    writer, shifts = GraphWriter(graph_module), _Shifts(mask_or_targets, graph.tables)
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and (write := _RULES.get(node.target)) is not None:
            writer.replace(node, write, shifts, node)
    graph_module.graph.eliminate_dead_code()


class _Shifts:
    """Writes shifted rows of hidden states."""

    def __init__(self, mask_or_targets: Node, tables: ModelTables) -> None:
        self._padding_mask, self.tables = mask_or_targets, tables
        self.tokens = int(mask_or_targets.meta["val"].shape[-1])

    def shifted(self, writer: GraphWriter, source: Node, offsets: range, node: Node) -> list[Node]:
        """Shift f32 [rows, width, tokens] by each offset: a token gets the one `offset` places after it."""
        if offsets == range(1):
            return [source]
        rows, width, tokens = source.meta["val"].shape
        ones = writer.call(aten.relu.default, writer.plus(self._padding_mask, 1.0))
        masked = writer.times(source, writer.reshape(ones, [rows, 1, tokens]))
        flat = writer.reshape(masked, [1, rows * width, tokens])
        results = []
        for offset in offsets:
            if offset:
                table = ModelTable("behind", 1, abs(offset))
                key, shape = ("behind", abs(offset), 1), [1, tokens, tokens]
                relation = insert_table(node, self.tables, key, table, shape, torch.float32)
                if offset < 0:
                    relation = writer.call(aten.transpose.int, relation, 1, 2)
                moved = writer.call(aten.bmm.default, flat, relation)
                results.append(writer.reshape(moved, [rows, width, tokens]))
            else:
                results.append(masked)
        return results


def _padded(writer: GraphWriter, shifts: _Shifts, node: Any) -> Node | None:
    """Write a slice that is padded with zeros to its old length as a shift."""
    part, pads, *fill = node.args
    shape = list(node.meta["val"].shape)
    if part.target is not aten.slice.Tensor or len(shape) != 3 or shape[1] != shifts.tokens:
        return None
    source, dim, start = (*part.args, 0, 0)[:3]
    zeros_before, zeros_after = pads[2:4] if len(pads) > 3 else (0, 0)
    missing = shifts.tokens - part.meta["val"].shape[1]
    offsets = {(missing, 0, missing): missing, (0, missing, 0): -missing}
    is_zero_padding = all(each in ("constant", None, 0) for each in fill)
    if (
        dim != 1
        or not is_zero_padding
        or any(pads[:2])
        or any(pads[4:])
        or (start, zeros_before, zeros_after) not in offsets
    ):
        return None
    offset = offsets[start, zeros_before, zeros_after]
    transposed = writer.call(aten.permute.default, source, [0, 2, 1])
    (shifted_rows,) = shifts.shifted(writer, transposed, range(offset, offset + 1), node)
    return writer.call(aten.permute.default, shifted_rows, [0, 2, 1])


def _convolved(writer: GraphWriter, shifts: _Shifts, node: Any) -> Node | None:
    """Write a convolution along the tokens, depthwise or dense."""
    source, weight, bias, stride, padding, dilation, groups = convolution_of(node)
    out, part, *sizes = weight.meta["val"].shape
    if len(sizes) == 2 and sizes[1] == 1:
        return _convolved_by_heads(writer, shifts, node)
    if len(sizes) != 1:
        return None
    taps = sizes[0]
    radius = taps // 2
    is_centred = taps % 2 == 1 and (*stride, *padding, *dilation) == (1, radius, 1)
    if not is_centred or source.meta["val"].shape[-1] != shifts.tokens or groups not in (1, out):
        return None
    result = None
    for tap, shifted_rows in enumerate(shifts.shifted(writer, source, range(-radius, taps - radius), node)):
        tap_weight = writer.call(aten.select.int, weight, 2, tap)
        if groups == 1:
            transposed = writer.call(aten.permute.default, shifted_rows, [0, 2, 1])
            layer = writer.call(aten.linear.default, transposed, tap_weight)
            term = writer.call(aten.permute.default, layer, [0, 2, 1])
        elif part == 1:
            term = writer.times(shifted_rows, tap_weight)
        else:
            return None
        result = term if result is None else writer.plus(result, term)
    return result if bias is None or result is None else writer.plus(result, writer.reshape(bias, [out, 1]))


def _convolved_by_heads(writer: GraphWriter, shifts: _Shifts, node: Any) -> Node | None:
    """Write a convolution [rows, heads, tokens, width] along the tokens with one kernel per head."""
    source, weight, bias, stride, padding, dilation, *_, groups = node.args
    rows, heads, tokens, width = source.meta["val"].shape
    taps = weight.meta["val"].shape[2]
    radius = taps // 2
    is_centred = taps % 2 == 1 and (*stride, *padding, *dilation) == (1, 1, radius, 0, 1, 1)
    if bias is not None or not is_centred or tokens != shifts.tokens or groups != heads:
        return None
    transposed = writer.call(aten.permute.default, source, [0, 1, 3, 2])
    flat = writer.reshape(transposed, [rows, heads * width, tokens])
    result = None
    for tap, shifted_rows in enumerate(shifts.shifted(writer, flat, range(-radius, taps - radius), node)):
        tap_weight = writer.call(aten.select.int, weight, 2, tap)
        term = writer.times(writer.reshape(shifted_rows, [rows, heads, width, tokens]), tap_weight)
        result = term if result is None else writer.plus(result, term)
    return None if result is None else writer.call(aten.permute.default, result, [0, 1, 3, 2])


def _concatenated_neighbours(writer: GraphWriter, shifts: _Shifts, node: Any) -> Node | None:
    source, (taps, other), *more = node.args
    rows, width, tokens, one = source.meta["val"].shape
    radius = taps // 2
    if (tokens, one, other, taps % 2, more) != (shifts.tokens, 1, 1, 1, [[1, 1], [radius, 0], [1, 1]]):
        return None
    flat = writer.reshape(source, [rows, width, tokens])
    parts = [
        writer.reshape(shifted_rows, [rows, width, 1, tokens])
        for shifted_rows in shifts.shifted(writer, flat, range(-radius, taps - radius), node)
    ]
    while len(parts) > 1:
        groups = [parts[start : start + _LARGEST_CAT] for start in range(0, len(parts), _LARGEST_CAT)]
        parts = [writer.call(aten.cat.default, group, 2) if group[1:] else group[0] for group in groups]
    return writer.reshape(parts[0], [rows, width * taps, tokens])


def _first(writer: GraphWriter, shifts: _Shifts, node: Any) -> Node | None:
    """Write the first token of f32 [rows, tokens, width] as a product with a table.

    The backward pass of a slice would depend on the number of tokens after it.
    """
    source, dim, *bounds = node.args
    value = source.meta["val"]
    is_first = bounds == [0] if node.target is aten.select.int else bounds == [0, 1]
    if value.dtype != torch.float32 or value.dim() != 3 or (dim, is_first) != (1, True):
        return None
    rows, tokens, _ = value.shape
    if tokens != shifts.tokens:
        return None
    table = ModelTable("behind", 1)
    identity = insert_table(node, shifts.tables, ("behind", 0, 1), table, [1, tokens, tokens], torch.float32)
    one_hot = writer.call(
        aten.expand.default, writer.call(aten.slice.Tensor, identity, 1, 0, 1), [rows, 1, tokens]
    )
    return writer.reshape(writer.call(aten.bmm.default, one_hot, source), node.meta["val"].shape)


_RULES: dict[Any, Callable[[GraphWriter, _Shifts, Node], Node | None]] = {
    aten.select.int: _first,
    aten.slice.Tensor: _first,
    aten.constant_pad_nd.default: _padded,
    aten.pad.default: _padded,
    aten.convolution.default: _convolved,
    aten.conv1d.default: _convolved,
    aten.conv2d.default: _convolved,
    aten.im2col.default: _concatenated_neighbours,
}


register(
    Pattern(
        "neighbours",
        serves="encoders whose tokens read neighbouring tokens, or the first token",
        model_types=("bert", "convbert", "funnel", "mobilebert", "nystromformer", "roberta"),
        example="convbert",
        rewrites=(Rewrite(write_neighbours, operators=tuple(_RULES), of="encoder"),),
    )
)
