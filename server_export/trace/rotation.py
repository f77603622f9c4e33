"""Write rotary embeddings, as transformers computes them, in operators that stay in one delegate.

x * cos + cat(-x[half:], x[:half]) * sin        for x [rows, heads, length, width]
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from server_export.ir.writer import GraphWriter

aten = torch.ops.aten


def write_rotations_as_linear(graph_module: GraphModule) -> None:
    """Write the rotation of halves of a head as a linear layer, in place.

    Cosines and sines stay products with tables. Slices along a dynamic number of rows would leave the
    delegate.
    """
    writer = GraphWriter(graph_module)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.cat.default):
        source = _halves(node)
        if source is not None:
            writer.replace(node, rotate_by_linear, source, True)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def _halves(node: Node) -> Node | None:
    """Return x if a node is cat(-x[half:], x[:half]) in the last of four dimensions, else None."""
    parts: Any = node.args[0]
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return None
    source: Node = parts[1].args[0] if parts[1].target is aten.slice.Tensor else parts[1]
    shape = source.meta["val"].shape
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if len(shape) != 4 or dim % 4 != 3 or shape[-1] % 2:
        return None
    bounds = [bounds_of(part, source, shape[-1]) for part in (parts[0].args[0], parts[1])]
    half = shape[-1] // 2
    return source if bounds == [(half, shape[-1], 1), (0, half, 1)] else None


def rotate_by_linear(writer: GraphWriter, source: Node, of_halves: bool) -> Node:
    """Write a linear layer that rotates pairs of elements: from the two halves, or neighbours."""
    width = source.meta["val"].shape[-1]
    rotation, unit = torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.eye(width // 2)
    rows = torch.kron(rotation, unit) if of_halves else torch.kron(unit, rotation)
    return writer.call(aten.linear.default, source, writer.constant(rows))


def bounds_of(node: Any, source: Node, width: int) -> tuple[int, int, int] | None:
    """Return start, end and step of a slice of the last of four dimensions, or None for other nodes."""
    if not isinstance(node, Node) or node.target is not aten.slice.Tensor or node.args[0] is not source:
        return None
    arguments: list[Any] = list(node.args[1:])
    defaults: list[Any] = [0, None, None, 1]
    dim, start, end, step = arguments + defaults[len(arguments) :]
    if dim % 4 != 3:
        return None
    return int(start or 0), min(width, width if end is None else int(end)), int(step)
