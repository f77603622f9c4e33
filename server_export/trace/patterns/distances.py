"""Values that depend on the distance of two tokens, such as the relative position buckets of T5's encoder."""

from __future__ import annotations

import torch
from torch.fx import Node

from server_export.ir.markers import TOKENS
from server_export.ir.writer import GraphWriter
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.position_folding import expand_to_users, shape_of_one_row, window_of_mask
from server_export.trace.tables import ModelTable, ModelTables, insert_table

aten = torch.ops.aten


def write_distances(graph: ModelGraph) -> None:
    """Write square matrices whose elements depend on the distance alone as tables, in place.

    Causal masks become other tables.
    """
    positions, writer = graph.positions, GraphWriter(graph.graph_module)
    for node in [node for node in positions.ends if node.users]:
        value = positions.of(node, positions.longest)
        is_square = sum(size % TOKENS == 0 for size in shape_of_one_row(node)) == 2
        is_constant = bool((value == value.reshape(-1)[0]).all())
        if not is_square or is_constant or window_of_mask(value) is not None:
            continue
        if (by_distance := _by_distance(value)) is not None:
            writer.replace(node, _relative, node, graph.tables, by_distance)
            positions.ends.remove(node)


def _by_distance(value: torch.Tensor) -> torch.Tensor | None:
    """Return the values [2 length - 1] of a square matrix by distance, or None if distance isn't enough."""
    length = value.shape[-1]
    if value.numel() != length**2 or value.dtype not in (torch.float32, torch.long, torch.bool):
        return None
    square = value.reshape(length, length)
    values = torch.cat([square[0, 1:].flip(0), square[:, 0]])
    is_relative = torch.equal(ModelTable("relative", values=values).of(length)[0], square)
    return values if is_relative else None


def _relative(writer: GraphWriter, node: Node, tables: ModelTables, values: torch.Tensor) -> Node:
    """Write a table of values by distance; booleans are stored as 1 and 0."""
    dtype = torch.float32 if values.dtype is torch.bool else values.dtype
    values = values.to(dtype)
    key = ("relative", dtype, values.numpy().tobytes())
    matrix = insert_table(
        node, tables, key, ModelTable("relative", values=values), [1, TOKENS, TOKENS], dtype
    )
    matrix = writer.reshape(matrix, shape_of_one_row(node))
    if node.meta["val"].dtype is torch.bool:
        matrix = writer.call(aten.ne.Scalar, matrix, 0)
    return expand_to_users(writer, node, matrix)


register(
    Pattern(
        "distances",
        serves="encoders with values by the distance of two tokens, such as T5's relative positions",
        model_types=("mpnet", "mt5", "t5", "umt5"),
        example="t5",
        rewrites=(Rewrite(write_distances, "tables", of="encoder"),),
    )
)
