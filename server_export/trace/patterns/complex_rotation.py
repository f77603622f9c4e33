"""Rotary embeddings as products of complex numbers: what turns pairs that lie side by side.

complex(x) * complex(cos, sin)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Node

from server_export.adapter.layers import replace_module
from server_export.ir.writer import Writer
from server_export.trace.model_graph import ModelGraph, TracedModel
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.rotation import turned_by_layer
from server_export.trace.tables import ModelTable, ModelTables, rotary_names, rotary_values

aten = torch.ops.aten


class _ComplexRotary(nn.Module):
    """A rotary embedding whose complex numbers are a table.

    Args:
        tables: where it is asked for.
        values: f32 [longest, width], cosines and sines in turn.
    """

    def __init__(self, tables: ModelTables, values: torch.Tensor) -> None:
        super().__init__()
        self.tables = tables
        self.values = values

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Complex numbers [1, length, width / 2]."""
        length = position_ids.shape[-1]
        table = self.tables.ask(
            (id(self), None, 0),
            lambda: ModelTable("rotary", values=self.values),
            (1, length, self.values.shape[-1]),
            torch.float32,
        )
        return torch.view_as_complex(table.unflatten(-1, (-1, 2)))


def _prepare(traced: TracedModel) -> None:
    """Make tables of the rotary embeddings that are left: those of complex numbers."""
    model, tables = traced.model, traced.tables
    for name in rotary_names(model):
        numbers: Any = rotary_values(model, name, tables.longest)[None]
        pairs = torch.view_as_real(numbers).flatten(-2)
        replace_module(model, name, _ComplexRotary(tables, pairs.reshape(pairs.shape[-2:])))


def write_complex(graph: ModelGraph) -> None:
    """Write products of complex numbers as what turns pairs that lie side by side, in place."""
    graph_module = graph.graph_module
    writer = Writer(graph_module)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.view_as_real.default):
        product = node.args[0]
        pairs = [_pairs(source) for source in product.all_input_nodes]
        if product.target is aten.mul.Tensor and len(pairs) == 2 and all(pairs):
            writer.replace(node, _multiplied, *pairs)
    graph_module.graph.eliminate_dead_code()


def _pairs(node: Node) -> tuple[Node, list[int]] | None:
    """The real numbers of complex ones, and the shape that these have with a dimension of 2 behind."""
    shape = [*node.meta["val"].shape, 2]
    while node.target in (aten.unsqueeze.default, aten.to.dtype, aten.reshape.default):
        node = node.args[0]
    return (node.args[0], shape) if node.target is aten.view_as_complex.default else None


def _multiplied(writer: Writer, left: tuple[Node, list[int]], right: tuple[Node, list[int]]) -> Node:
    """left * cos + turned left * sin, where `right` is pairs of cosines and sines."""
    *lead, count, _ = left[1]
    flat = writer.reshape(left[0], [*lead, 2 * count])
    tables = writer.reshape(*right)
    dim = len(right[1]) - 1
    alone = (writer.call(aten.slice.Tensor, tables, dim, at, at + 1) for at in (0, 1))
    cosines, sines = (
        writer.reshape(writer.call(aten.expand.default, part, right[1]), [*right[1][:-2], 2 * count])
        for part in alone
    )
    turned = writer.times(turned_by_layer(writer, flat, False), sines)
    return writer.reshape(writer.plus(writer.times(flat, cosines), turned), left[1])


register(
    Pattern(
        "complex rotations",
        serves="rotary embeddings as products of complex numbers, such as DeepSeek V2's and Llama 4's",
        model_types=("deepseek_v2", "llama4", "llama4_text"),
        example="deepseek_v2",
        # Those of cosines and sines are tables already.
        attributes=("rope_type",),
        prepare=_prepare,
        rewrites=(Rewrite(write_complex, operators=(aten.view_as_real.default,)),),
    )
)
