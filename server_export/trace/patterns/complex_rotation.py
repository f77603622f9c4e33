"""Rotary embeddings as products of complex numbers, which rotate pairs of neighbouring elements.

complex(x) * complex(cos, sin)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Node

from server_export.adapter.layers import replace_module
from server_export.ir.writer import GraphWriter
from server_export.trace.model_graph import ModelGraph, TracedModel
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.rotation import rotate_by_linear
from server_export.trace.tables import ModelTable, ModelTables, rotary_names, rotary_values

aten = torch.ops.aten


class _ComplexRotary(nn.Module):
    """A rotary embedding whose complex numbers are a table.

    Args:
        tables: the tables of the model.
        values: f32 [longest, width], alternating cosines and sines.
    """

    def __init__(self, tables: ModelTables, values: torch.Tensor) -> None:
        super().__init__()
        self.tables = tables
        self.values = values

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return complex numbers [1, length, width / 2]."""
        length = position_ids.shape[-1]
        table = self.tables.request(
            (id(self), None, 0),
            lambda: ModelTable("rotary", values=self.values),
            (1, length, self.values.shape[-1]),
            torch.float32,
        )
        return torch.view_as_complex(table.unflatten(-1, (-1, 2)))


def _prepare(traced: TracedModel) -> None:
    """Replace the remaining rotary embeddings, which return complex numbers, by tables."""
    model, tables = traced.model, traced.tables
    for name in rotary_names(model):
        rotations: Any = rotary_values(model, name, tables.longest)[None]
        pairs = torch.view_as_real(rotations).flatten(-2)
        replace_module(model, name, _ComplexRotary(tables, pairs.reshape(pairs.shape[-2:])))


def write_complex(graph: ModelGraph) -> None:
    """Write products of complex numbers as rotations of pairs of real numbers, in place."""
    graph_module = graph.graph_module
    writer = GraphWriter(graph_module)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.view_as_real.default):
        product = node.args[0]
        pairs = [_pairs(source) for source in product.all_input_nodes]
        if product.target is aten.mul.Tensor and len(pairs) == 2 and all(pairs):
            writer.replace(node, _rotate, *pairs)
    graph_module.graph.eliminate_dead_code()


def _pairs(node: Node) -> tuple[Node, list[int]] | None:
    """Return the real tensor behind a complex one, and the shape of the complex one followed by 2."""
    shape = [*node.meta["val"].shape, 2]
    while node.target in (aten.unsqueeze.default, aten.to.dtype, aten.reshape.default):
        node = node.args[0]
    return (node.args[0], shape) if node.target is aten.view_as_complex.default else None


def _rotate(writer: GraphWriter, left: tuple[Node, list[int]], right: tuple[Node, list[int]]) -> Node:
    """Write left * cos + rotated left * sin, where `right` holds pairs of cosines and sines."""
    *lead, count, _ = left[1]
    flat = writer.reshape(left[0], [*lead, 2 * count])
    tables = writer.reshape(*right)
    dim = len(right[1]) - 1
    components = (writer.call(aten.slice.Tensor, tables, dim, index, index + 1) for index in (0, 1))
    cosines, sines = (
        writer.reshape(writer.call(aten.expand.default, part, right[1]), [*right[1][:-2], 2 * count])
        for part in components
    )
    rotated = writer.times(rotate_by_linear(writer, flat, False), sines)
    return writer.reshape(writer.plus(writer.times(flat, cosines), rotated), left[1])


register(
    Pattern(
        "complex rotations",
        serves="rotary embeddings as products of complex numbers, such as DeepSeek V2's and Llama 4's",
        model_types=("deepseek_v2", "llama4", "llama4_text"),
        example="deepseek_v2",
        # Embeddings of cosines and sines are tables already.
        attributes=("rope_type",),
        prepare=_prepare,
        rewrites=(Rewrite(write_complex, operators=(aten.view_as_real.default,)),),
    )
)
