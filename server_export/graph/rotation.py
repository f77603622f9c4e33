"""Rotary embeddings of a graph, as transformers writes them, become products with the matrices that they are.

    x * cos + cat(-x[half:], x[:half]) * sin        for x [rows, heads, length, width]

At a position this is a linear map of the width, and so is a scale that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from server_export.graph.modules import remove_unused_attributes
from server_export.graph.shapes import fill_in_values
from server_export.graph.writing import Writer

aten = torch.ops.aten

# A product costs the square of a head's width, written out it costs the width: wider heads gain nothing.
_WIDEST_ROTATION = 128
# Numbers of all positions' matrices, 4 MiB of them: more would be read from memory, not from the cache.
_LARGEST_ROTATION = 1 << 20


def rotate(graph_module: GraphModule) -> None:
    """Make one matrix product of every rotary embedding of a rewritten graph, in place.

    Written out, a rotation passes ten times over queries and keys: slices, a negation, two products with
    tables, a sum, a scale. Which form a program has must not depend on its rows: the scalars of all numbers
    of copies are the same. The product takes positions before rows, so what looks at rows comes first.
    """
    fill_in_values(graph_module)
    writer = Writer(graph_module)
    for rotation in find_rotations(graph_module):
        length, width = rotation.source.meta["val"].shape[-2:]
        if rotates_by_product(length, width):
            writer.replace(rotation.result, _turned, rotation)
    graph_module.graph.eliminate_dead_code()
    remove_unused_attributes(graph_module)
    graph_module.recompile()


def turn_by_layers(graph_module: GraphModule) -> None:
    """Make a linear layer of what turns the halves of a head, cat(-x[half:], x[:half]), in place.

    The cosines and sines stay products with tables. Slices of any number of rows would leave the delegate.
    """
    writer = Writer(graph_module)
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.cat.default):
        source = _source_of_turned(node)
        if source is not None:
            writer.replace(node, _turned_halves, source)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def _source_of_turned(node: Node) -> Node | None:
    """What a node turns the halves of; None if it doesn't."""
    part: Any = node.args[0][1]
    if part.target is not aten.slice.Tensor or part.args[0].meta["val"].dim() != 4:
        return None
    source: Node = part.args[0]
    return source if _is_turned(node, source, source.meta["val"].shape[-1]) else None


def _turned_halves(writer: Writer, source: Node) -> Node:
    width = source.meta["val"].shape[-1]
    unit = torch.eye(width // 2)
    none = torch.zeros_like(unit)
    rows = torch.cat([torch.cat([none, -unit], 1), torch.cat([unit, none], 1)])
    return writer.call(aten.linear.default, source, writer.constant(rows))


def rotates_by_product(length: int, width: int) -> bool:
    """Whether `rotate` makes products of the rotations of heads of this width."""
    return width <= _WIDEST_ROTATION and length * width * width <= _LARGEST_ROTATION


def _turned(writer: Writer, rotation: Rotation) -> Node:
    rows, heads, length, width = rotation.source.meta["val"].shape
    table = writer.constant(rotation.matrices())
    by_position = writer.call(aten.permute.default, rotation.source, [2, 0, 1, 3])
    flat = writer.reshape(by_position, [length, rows * heads, width])
    turned = writer.reshape(writer.call(aten.bmm.default, flat, table), [length, rows, heads, width])
    return writer.call(aten.permute.default, turned, [1, 2, 0, 3])


@dataclass(frozen=True)
class Rotation:
    """One rotary embedding: from `source` [rows, heads, length, width] to `result` of the same shape."""

    source: Node
    result: Node
    cos: torch.Tensor
    sin: torch.Tensor
    scale: float

    def matrices(self) -> torch.Tensor:
        """[length, width, width]: the row vector of a position times its matrix is what it becomes."""
        length, width = self.result.meta["val"].shape[-2:]
        half = width // 2
        cos, sin = (table.expand(1, 1, length, width)[0, 0] for table in (self.cos, self.sin))
        matrices = torch.diag_embed(cos)
        low, high = torch.arange(half), torch.arange(half, width)
        matrices[:, high, low] = -sin[:, :half]
        matrices[:, low, high] = sin[:, half:]
        return matrices * self.scale


def find_rotations(graph_module: GraphModule) -> Iterator[Rotation]:
    """Every rotary embedding of the graph, with the scale that follows it."""
    for node in list(graph_module.graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs:
            match = _match(graph_module, *node.args)
            if match is not None:
                source, cos, sin = match
                result, scale = _scaled(node)
                yield Rotation(source, result, cos, sin, scale)


def _match(
    graph_module: GraphModule, left: Any, right: Any
) -> tuple[Node, torch.Tensor, torch.Tensor] | None:
    straight, turned = _times_table(graph_module, left), _times_table(graph_module, right)
    if straight is None or turned is None:
        return None
    if turned[0].target is not aten.cat.default:
        straight, turned = turned, straight
    (source, cos), (turned_source, sin) = straight, turned
    shape = source.meta["val"].shape
    if len(shape) != 4 or not _is_turned(turned_source, source, shape[-1]):
        return None
    return source, cos, sin


def _times_table(graph_module: GraphModule, node: Any) -> tuple[Node, torch.Tensor] | None:
    """What is multiplied by a constant, and the constant."""
    if not isinstance(node, Node) or node.target is not aten.mul.Tensor:
        return None
    for source, table in (node.args, node.args[::-1]):
        if isinstance(table, Node) and isinstance(source, Node) and table.op == "get_attr":
            value: Any = getattr(graph_module, str(table.target), None)
            is_table = isinstance(value, torch.Tensor) and value.dim() in (2, 3, 4)
            if is_table and value.shape[:-2].numel() == 1:
                return source, value.reshape(1, 1, *value.shape[-2:])
    return None


def _is_turned(node: Node, source: Node, width: int) -> bool:
    """Whether this is cat(-x[half:], x[:half]) of the last dimension."""
    if node.target is not aten.cat.default or width % 2:
        return False
    parts = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if len(parts) != 2 or dim % 4 != 3 or parts[0].target is not aten.neg.default:
        return False
    bounds = [_bounds(part, source, width) for part in (parts[0].args[0], parts[1])]
    return bounds == [(width // 2, width), (0, width // 2)]


def _bounds(node: Any, source: Node, width: int) -> tuple[int, int] | None:
    if not isinstance(node, Node) or node.target is not aten.slice.Tensor or node.args[0] is not source:
        return None
    given: list[Any] = list(node.args[1:])
    defaults: list[Any] = [0, None, None, 1]
    dim, start, end, step = given + defaults[len(given) :]
    if dim % 4 != 3 or step != 1:
        return None
    return int(start or 0), min(width, width if end is None else int(end))


def _scaled(node: Node) -> tuple[Node, float]:
    users = list(node.users)
    if len(users) == 1 and users[0].target is aten.mul.Tensor and isinstance(users[0].args[1], int | float):
        return users[0], float(users[0].args[1])
    return node, 1.0
