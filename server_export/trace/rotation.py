"""Rotary embeddings of a graph, as transformers writes them, in operators that stay in one delegate.

x * cos + cat(-x[half:], x[:half]) * sin        for x [rows, heads, length, width]
x * cos + stack(-x[1::2], x[::2]) * sin         pairs that lie side by side
complex(x) * complex(cos, sin)                  the same
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from server_export.ir.writer import Writer

aten = torch.ops.aten


def turn_by_layers(graph_module: GraphModule) -> None:
    """Make a linear layer of what turns the pairs of a head, in place.

    The cosines and sines stay products with tables. Slices of any number of rows would leave the delegate.
    """
    writer = Writer(graph_module)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.cat.default):
        for find in (_halves, _neighbours):
            source, turned = find(node)
            if source is not None:
                writer.replace(turned, _turned, source, find is _halves)
                break
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def write_complex(graph_module: GraphModule) -> None:
    """Write products of complex numbers as what turns pairs that lie side by side, in place."""
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
    turned = writer.times(_turned(writer, flat, False), sines)
    return writer.reshape(writer.plus(writer.times(flat, cosines), turned), left[1])


def _halves(node: Node) -> tuple[Node | None, Node]:
    """x of cat(-x[half:], x[:half]) in its last dimension, [rows, heads, length, width]; None if it isn't."""
    parts: Any = node.args[0]
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return None, node
    source: Node = parts[1].args[0] if parts[1].target is aten.slice.Tensor else parts[1]
    shape = source.meta["val"].shape
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if len(shape) != 4 or dim % 4 != 3 or shape[-1] % 2:
        return None, node
    bounds = [_bounds(part, source, shape[-1]) for part in (parts[0].args[0], parts[1])]
    half = shape[-1] // 2
    return (source if bounds == [(half, shape[-1], 1), (0, half, 1)] else None), node


def _neighbours(node: Node) -> tuple[Node | None, Node]:
    """x of stack(-x[1::2], x[::2]) in its last dimension, and the node that lays them side by side."""
    parts: Any = node.args[0]
    (user,) = node.users if len(node.users) == 1 else (node,)
    if len(parts) != 2 or any(part.target is not aten.reshape.default for part in parts):
        return None, node
    first, second = (part.args[0] for part in parts)
    if first.target is not aten.neg.default or second.target is not aten.slice.Tensor:
        return None, node
    source, (*lead, width) = second.args[0], second.args[0].meta["val"].shape
    shapes = [tuple(each.meta["val"].shape) for each in (node, user)]
    if len(lead) != 3 or shapes != [(*lead, width // 2, 2), (*lead, width)]:
        return None, node
    bounds = [_bounds(part, source, width) for part in (first.args[0], second)]
    return (source if bounds == [(1, width, 2), (0, width, 2)] else None), user


def _turned(writer: Writer, source: Node, of_halves: bool) -> Node:
    width = source.meta["val"].shape[-1]
    turn, unit = torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.eye(width // 2)
    rows = torch.kron(turn, unit) if of_halves else torch.kron(unit, turn)
    return writer.call(aten.linear.default, source, writer.constant(rows))


def _bounds(node: Any, source: Node, width: int) -> tuple[int, int, int] | None:
    if not isinstance(node, Node) or node.target is not aten.slice.Tensor or node.args[0] is not source:
        return None
    given: list[Any] = list(node.args[1:])
    defaults: list[Any] = [0, None, None, 1]
    dim, start, end, step = given + defaults[len(given) :]
    if dim % 4 != 3:
        return None
    return int(start or 0), min(width, width if end is None else int(end)), int(step)
