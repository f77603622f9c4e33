"""Causal convolutions, and shifts to earlier tokens, as operators with a recurrent state.

The layers of transformers call a function of their module, which kernel packages replace by its name; this
pattern does the same. Otherwise the convolution is found in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from prge.formats.relations import relation_shape
from server_export.ir.recurrences import CONVOLUTION
from server_export.ir.writer import GraphWriter
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.tables import ModelTable, ModelTables, insert_table

aten = torch.ops.aten
_PADS, _CONVOLUTIONS = (
    (aten.pad.default, aten.constant_pad_nd.default),
    (aten.conv1d.default, aten.convolution.default),
)


def convolution(
    tables: ModelTables,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    **_: Any,
) -> torch.Tensor:
    """Compute a causal depthwise convolution of hidden states [rows, width, tokens], weight [width, taps]."""
    from transformers.activations import ACT2FN

    width, taps = weight.shape
    padded = F.conv1d(hidden_states, weight.unsqueeze(1), bias, padding=taps - 1, groups=width)
    output = padded[..., : hidden_states.shape[-1]]
    if activation is None:
        return output
    act: Any = ACT2FN[activation] if isinstance(activation, str) else activation
    result: torch.Tensor = act(output)
    return result


def convolution_of(node: Any) -> tuple[Any, ...]:
    """Return input, weight, bias, stride, padding, dilation and groups of either convolution operator."""
    source, weight, *more = node.args
    if node.target is aten.conv1d.default:
        bias, stride, padding, dilation, groups = more + [None, [1], [0], [1], 1][len(more) :]
    else:
        bias, stride, padding, dilation, *_, groups = more
    return source, weight, bias, stride, padding, dilation, groups


def write_convolutions(graph: ModelGraph) -> None:
    """Replace causal convolutions by operators whose state is the last tokens, in place."""
    graph_module, tables = graph.graph_module, graph.tables
    writer = GraphWriter(graph_module)
    for node in list(graph_module.graph.nodes):
        if node.target in _PADS:
            writer.replace(node, _replace_shift, tables, node)
        if node.target in _CONVOLUTIONS:
            for part in list(node.users):
                writer.replace(part, _replace_convolution, tables, node, part)
    graph_module.graph.eliminate_dead_code()


def _replace_convolution(writer: GraphWriter, tables: ModelTables, node: Any, part: Any) -> Node | None:
    """Replace a causal convolution of f32 [rows, width, tokens] that is cut off after the last token."""
    source, weight, bias, stride, padding, dilation, groups = convolution_of(node)
    width, width_per_group, *sizes = weight.meta["val"].shape
    tokens = source.meta["val"].shape[-1]
    taps = sizes[0]
    is_cut_off = part.target is aten.slice.Tensor and part.meta["val"].shape[-1] == tokens
    starts_at_first = is_cut_off and part.args[1] % 3 == 2 and part.args[2] in (None, 0)
    is_causal = len(sizes) == 1 and (*stride, *padding, *dilation) == (1, taps - 1, 1)
    if not (starts_at_first and is_causal and (groups, width_per_group) == (width, 1) and taps > 1):
        return None

    tap_columns = [
        writer.reshape(writer.call(aten.select.int, weight, 2, taps - 1 - distance), [width, 1])
        for distance in range(taps)
    ]
    output = _write_convolution(writer, tables, part, source, tap_columns)
    return output if bias is None else writer.plus(output, writer.reshape(bias, [width, 1]))


def _replace_shift(writer: GraphWriter, tables: ModelTables, node: Any) -> Node | None:
    """Replace a shift of f32 [rows, tokens, width] to earlier tokens by a convolution."""
    source, pads, *fill = node.args
    shape = node.meta["val"].shape
    is_zero_padding = all(each in ("constant", None, 0) for each in fill)
    is_shift = len(pads) == 4 and pads[:2] == [0, 0] and pads[2] == -pads[3] > 0
    if len(shape) != 3 or not (is_shift and is_zero_padding):
        return None
    taps = [torch.zeros(shape[2], 1)] * pads[2] + [torch.ones(shape[2], 1)]
    transposed = writer.call(aten.permute.default, source, [0, 2, 1])
    output = _write_convolution(writer, tables, node, transposed, [*map(writer.constant, taps)])
    return writer.call(aten.permute.default, output, [0, 2, 1])


def _write_convolution(
    writer: GraphWriter, tables: ModelTables, before: Node, source: Node, columns: Sequence[Node]
) -> Node:
    """Write the convolution operator for f32 [rows, width, tokens] and taps [width, 1], with its tables."""
    taps, tokens = len(columns), source.meta["val"].shape[-1]

    def relation(table_type: str, first: int, window: int) -> Node:
        shape = [1, *relation_shape(table_type, tokens, window)[1:]]
        key, table = (table_type, first, window), ModelTable(table_type, window, first)
        return insert_table(before, tables, key, table, shape, torch.float32)

    return writer.call(
        CONVOLUTION,
        source,
        [*columns],
        relation("behind", 1, 1),
        [relation("entering", distance, taps - 1) for distance in range(1, taps)],
        relation("leaving", 0, taps - 1),
        relation("staying", 0, taps - 1),
    )


register(
    Pattern(
        "convolutions",
        serves="short causal convolutions, for example in layers with recurrences and in LFM 2",
        model_types=tuple(
            """
            bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_text inkling_text
            jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe
            qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rwkv
            """.split()
        ),
        example="lfm2",
        functions={"causal_conv1d_fn": convolution},
        rewrites=(Rewrite(write_convolutions, operators=(*_PADS, *_CONVOLUTIONS)),),
    )
)
