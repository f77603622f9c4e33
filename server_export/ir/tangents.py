"""Values of a graph with their tangents: the derivatives along several directions.

    primal     [1, *shape]            the value itself
    tangents   [queries, *shape]      its derivatives along the directions

The factor of an elementwise derivative is the same for every direction: it is put off for as long as
possible, because factors then meet each other before they meet the tangents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from server_export.ir.walks import origin
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten

Number = float | int
Shape = tuple[int, ...]
Factor: TypeAlias = Node | Number | None


def shape_of(node: Node) -> Shape:
    """The shape of a node's value."""
    return tuple(node.meta["val"].shape)


class GraphTangents(GraphWriter):
    """Appends values with tangents to a new graph. No constant's shape depends on rows, tokens or queries.

    Args:
        graph_module: where constants are kept.
        graph: the graph to append to.
        queries: tangents of every value.
        ones: inputs f32 [1, length, 1] of ones, by length.
    """

    def __init__(
        self, graph_module: GraphModule, graph: Graph, queries: int, ones: Mapping[int, Node]
    ) -> None:
        super().__init__(graph_module, graph=graph, ones=ones)
        self.queries = queries
        self._reshaped: dict[tuple[Node, Shape], Node] = {}
        self._read: dict[str, Node] = {}

    def attribute(self, name: str, tensor: torch.Tensor) -> Node:
        """See `GraphWriter`; one node for all that read it."""
        if name not in self._read:
            self._read[name] = super().attribute(name, tensor)
        return self._read[name]

    def reshape(self, source: Node, shape: Sequence[int]) -> Node:
        """The same numbers in another shape: none, one or an earlier operator."""
        source, shape = _as_stored(source), tuple(shape)
        if shape_of(source) == shape:
            return source
        if (source, shape) not in self._reshaped:
            self._reshaped[source, shape] = super().reshape(source, shape)
        return self._reshaped[source, shape]

    def product(self, left: Factor, right: Factor) -> Any:
        """left * right of nodes, numbers, or None for one."""
        if left is None or right is None:
            return right if left is None else left
        if isinstance(left, Node):
            return self.times(left, right)
        return self.times(right, left) if isinstance(right, Node) else left * right

    def one_of(self, node: Node) -> Node:
        """A value [*shape] that has no tangents, as a primal [1, *shape]."""
        return self.reshape(node, [1, *shape_of(node)])


def _as_stored(source: Node) -> Node:
    """A value before it was reshaped."""
    stored: Node = origin(source, [aten.reshape.default])[0]
    return stored


class Dual:
    """A value that depends on what is differentiated.

    Args:
        writer: of the graph that the value is computed in.
        primal: the value, [1, *shape].
        unscaled: the tangents [queries, *shape], still to be multiplied by `factor`.
        factor: None for one.
    """

    def __init__(self, writer: GraphTangents, primal: Node, unscaled: Node, factor: Factor = None) -> None:
        self.writer = writer
        self.primal = primal
        self.unscaled = unscaled
        self.factor = factor

    @property
    def shape(self) -> Shape:
        """The value's."""
        return shape_of(self.primal)[1:]

    @cached_property
    def tangents(self) -> Node:
        """The tangents, [queries, *shape]."""
        tangents: Node = self.writer.product(self.factor, self.unscaled)
        return tangents

    @property
    def value(self) -> Node:
        """The value itself, [*shape]."""
        return self.writer.reshape(self.primal, self.shape)

    def scaled(self, primal: Node, factor: Factor = None) -> Dual:
        """Another value of this shape: its tangents are these times `factor`."""
        return Dual(self.writer, primal, self.unscaled, self.writer.product(self.factor, factor))

    def reshaped(self, shape: Shape) -> Dual:
        """The same numbers in another shape."""
        return self.each(lambda part, count: self.writer.reshape(part, [count, *shape]))

    def each(self, make: Callable[[Node, int], Node]) -> Dual:
        """A linear operator of value and tangents; `make(part, count)` writes it for `count` of them."""
        return Dual(self.writer, make(self.primal, 1), make(self.tangents, self.writer.queries))

    def aligned(self, rank: int) -> Dual:
        """The same value with dimensions of 1 in front, so that queries don't meet another's dimensions."""
        missing = rank - len(self.shape)
        return self.reshaped((*[1] * missing, *self.shape)) if missing > 0 else self


class Interleaved(Dual):
    """From a primal, and tangents that stand in front of the last dimension.

    A product of matrices makes and takes them so in one call, without a copy of the other matrix for each.
    What wants queries in front gets them, at the price of a transposition.

    Args:
        inside: the tangents [*shape[:-1], queries, shape[-1]], in any shape.
    """

    def __init__(self, writer: GraphTangents, primal: Node, inside: Node) -> None:
        self.writer = writer
        self.primal = primal
        self.factor = None
        self._inside = inside

    @classmethod
    def of(cls, dual: Dual) -> Interleaved:
        """Any dual in this form."""
        if isinstance(dual, Interleaved):
            return dual
        rank = len(dual.shape)
        inside = dual.writer.call(aten.permute.default, dual.tangents, [*range(1, rank), 0, rank])
        return cls(dual.writer, dual.primal, inside)

    @property
    def inside(self) -> Node:
        """The tangents, [*shape[:-1], queries, shape[-1]]."""
        *lead, width = self.shape
        return self.writer.reshape(self._inside, [*lead, self.writer.queries, width])

    def meeting(self, primal: Node) -> tuple[Node, Node]:
        """Numbers [1, *shape] and the tangents, in shapes that need no copy and that broadcast."""
        queries, width, writer = self.writer.queries, self.shape[-1], self.writer
        *lead, last = shape_of(_as_stored(self._inside))
        if last != queries * width:
            lead = [*self.shape[:-1]]
        return (
            writer.reshape(primal, [*lead, 1, width]),
            writer.reshape(self._inside, [*lead, queries, width]),
        )

    def scaled(self, primal: Node, factor: Factor = None) -> Dual:
        """Another value of this shape: its tangents are these times `factor`, where they are without one."""
        if factor is None:
            return Interleaved(self.writer, primal, self._inside)
        return super().scaled(primal, factor)

    def reshaped(self, shape: Shape) -> Dual:
        """The same numbers in another shape; tangents stay in front of a last dimension that stays."""
        if shape[-1] != self.shape[-1]:
            return super().reshaped(shape)
        return Interleaved(self.writer, self.writer.reshape(self.primal, [1, *shape]), self._inside)

    @cached_property
    def unscaled(self) -> Node:
        """The tangents with queries in front."""
        rank = len(self.shape)
        return self.writer.call(aten.permute.default, self.inside, [rank - 1, *range(rank - 1), rank])
