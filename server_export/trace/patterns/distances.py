"""Numbers of pairs of tokens by their distance, such as the buckets of relative positions of T5's encoder."""

from __future__ import annotations

import torch
from torch.fx import Node

from server_export.ir.markers import TOKENS
from server_export.ir.writer import GraphWriter
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.positional import of_one_row, spread, window_of_mask
from server_export.trace.tables import ModelTable, ModelTables, asked

aten = torch.ops.aten


def write_distances(graph: ModelGraph) -> None:
    """Make tables of squares of numbers by distance, in place; of causal masks others are made."""
    positions, writer = graph.positions, GraphWriter(graph.graph_module)
    for node in [node for node in positions.ends if node.users]:
        value = positions.of(node, positions.longest)
        is_square = sum(size % TOKENS == 0 for size in of_one_row(node)) == 2
        is_even = bool((value == value.reshape(-1)[0]).all())
        if not is_square or is_even or window_of_mask(value) is not None:
            continue
        if (by_distance := _by_distance(value)) is not None:
            writer.replace(node, _relative, node, graph.tables, by_distance)
            positions.ends.remove(node)


def _by_distance(value: torch.Tensor) -> torch.Tensor | None:
    """The numbers [2 length - 1] of a square by the distance of two tokens, if it depends on that alone."""
    length = value.shape[-1]
    if value.numel() != length**2 or value.dtype not in (torch.float32, torch.long, torch.bool):
        return None
    square = value.reshape(length, length)
    values = torch.cat([square[0, 1:].flip(0), square[:, 0]])
    is_it = torch.equal(ModelTable("relative", values=values).of(length)[0], square)
    return values if is_it else None


def _relative(writer: GraphWriter, node: Node, tables: ModelTables, values: torch.Tensor) -> Node:
    """A square of numbers by distance; what holds or doesn't is 1 or 0 in its table."""
    dtype = torch.float32 if values.dtype is torch.bool else values.dtype
    values = values.to(dtype)
    key = ("relative", dtype, values.numpy().tobytes())
    found = asked(node, tables, key, ModelTable("relative", values=values), [1, TOKENS, TOKENS], dtype)
    found = writer.reshape(found, of_one_row(node))
    if node.meta["val"].dtype is torch.bool:
        found = writer.call(aten.ne.Scalar, found, 0)
    return spread(writer, node, found)


register(
    Pattern(
        "distances",
        serves="encoders with numbers by the distance of two tokens, such as T5's relative positions",
        model_types=("mpnet", "mt5", "t5", "umt5"),
        example="t5",
        rewrites=(Rewrite(write_distances, "tables", of="encoder"),),
    )
)
