"""Rotary embeddings of a graph, as transformers writes them, in operators that stay in one delegate.

x * cos + cat(-x[half:], x[:half]) * sin        for x [rows, heads, length, width]
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from server_export.graph.writing import Writer

aten = torch.ops.aten


def turn_by_layers(graph_module: GraphModule) -> None:
    """Make a linear layer of what turns the halves of a head, cat(-x[half:], x[:half]), in place.

    The cosines and sines stay products with tables. Slices of any number of rows would leave the delegate.
    """
    writer = Writer(graph_module)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.cat.default):
        source = _turned(node)
        if source is not None:
            writer.replace(node, _turned_halves, source)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def _turned(node: Node) -> Node | None:
    """x of cat(-x[half:], x[:half]) in its last dimension, [rows, heads, length, width]; None if it isn't."""
    parts: Any = node.args[0]
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return None
    source: Node = parts[1].args[0] if parts[1].target is aten.slice.Tensor else parts[1]
    shape = source.meta["val"].shape
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if len(shape) != 4 or dim % 4 != 3 or shape[-1] % 2:
        return None
    bounds = [_bounds(part, source, shape[-1]) for part in (parts[0].args[0], parts[1])]
    return source if bounds == [(shape[-1] // 2, shape[-1]), (0, shape[-1] // 2)] else None


def _turned_halves(writer: Writer, source: Node) -> Node:
    width = source.meta["val"].shape[-1]
    unit = torch.eye(width // 2)
    none = torch.zeros_like(unit)
    rows = torch.cat([torch.cat([none, -unit], 1), torch.cat([unit, none], 1)])
    return writer.call(aten.linear.default, source, writer.constant(rows))


def _bounds(node: Any, source: Node, width: int) -> tuple[int, int] | None:
    if not isinstance(node, Node) or node.target is not aten.slice.Tensor or node.args[0] is not source:
        return None
    given: list[Any] = list(node.args[1:])
    defaults: list[Any] = [0, None, None, 1]
    dim, start, end, step = given + defaults[len(given) :]
    if dim % 4 != 3 or step != 1:
        return None
    return int(start or 0), min(width, width if end is None else int(end))
