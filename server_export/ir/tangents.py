"""Values of a graph with their tangents: derivatives along several directions.

    primal     [1, *shape]            the value
    tangents   [queries, *shape]      its derivatives along the directions

The factor of an elementwise derivative is the same for every direction. Its product with the tangents is
delayed as long as possible, so that factors are multiplied with each other first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from server_export.ir.traversal import origin
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten

Number = float | int
Shape = tuple[int, ...]
Factor: TypeAlias = Node | Number | None


def shape_of(node: Node) -> Shape:
    """Return the shape of a node's value."""
    return tuple(node.meta["val"].shape)


class GraphTangents(GraphWriter):
    """Appends values with tangents to a new graph; no constant's shape depends on rows, tokens or queries.

    Args:
        graph_module: the module that stores the constants.
        graph: the graph to append to.
        queries: the number of tangents of every value.
        ones: inputs f32 [1, length, 1] of ones, by length.
    """

    def __init__(
        self, graph_module: GraphModule, graph: Graph, queries: int, ones: Mapping[int, Node]
    ) -> None:
        super().__init__(graph_module, graph=graph, ones=ones)
        self.queries = queries
        self._reshapes: dict[tuple[Node, Shape], Node] = {}
        self._attributes: dict[str, Node] = {}

    def attribute(self, name: str, tensor: torch.Tensor) -> Node:
        """See `GraphWriter.attribute`; all readers of a tensor share one node."""
        if name not in self._attributes:
            self._attributes[name] = super().attribute(name, tensor)
        return self._attributes[name]

    def reshape(self, source: Node, shape: Sequence[int]) -> Node:
        """Write a reshape, unless the value has the shape or the same reshape exists already."""
        source, shape = _before_reshapes(source), tuple(shape)
        if shape_of(source) == shape:
            return source
        if (source, shape) not in self._reshapes:
            self._reshapes[source, shape] = super().reshape(source, shape)
        return self._reshapes[source, shape]

    def product(self, left: Factor, right: Factor) -> Any:
        """Return left * right, where both are nodes, numbers, or None for 1."""
        if left is None or right is None:
            return right if left is None else left
        if isinstance(left, Node):
            return self.times(left, right)
        return self.times(right, left) if isinstance(right, Node) else left * right

    def as_primal(self, node: Node) -> Node:
        """Return a value [*shape] without tangents as a primal [1, *shape]."""
        return self.reshape(node, [1, *shape_of(node)])


def _before_reshapes(source: Node) -> Node:
    """Return the value that a node is a reshape of, or the node itself."""
    value: Node = origin(source, [aten.reshape.default])[0]
    return value


class Dual:
    """A value that depends on the differentiated inputs.

    Args:
        writer: writes into the graph in which the value is computed.
        primal: the value, [1, *shape].
        unscaled: the tangents [queries, *shape] before their multiplication with `factor`.
        factor: None for 1.
    """

    def __init__(self, writer: GraphTangents, primal: Node, unscaled: Node, factor: Factor = None) -> None:
        self.writer = writer
        self.primal = primal
        self.unscaled = unscaled
        self.factor = factor

    @property
    def shape(self) -> Shape:
        """The shape of the value."""
        return shape_of(self.primal)[1:]

    @cached_property
    def tangents(self) -> Node:
        """The tangents, [queries, *shape]."""
        tangents: Node = self.writer.product(self.factor, self.unscaled)
        return tangents

    @property
    def value(self) -> Node:
        """The value, [*shape]."""
        return self.writer.reshape(self.primal, self.shape)

    def scaled(self, primal: Node, factor: Factor = None) -> Dual:
        """Return another value of this shape, whose tangents are this value's tangents times `factor`."""
        return Dual(self.writer, primal, self.unscaled, self.writer.product(self.factor, factor))

    def reshaped(self, shape: Shape) -> Dual:
        """Return the value and its tangents in another shape."""
        return self.map(lambda part, count: self.writer.reshape(part, [count, *shape]))

    def map(self, make: Callable[[Node, int], Node]) -> Dual:
        """Apply a linear operator to value and tangents; `make(part, count)` writes it for `count`."""
        return Dual(self.writer, make(self.primal, 1), make(self.tangents, self.writer.queries))

    def aligned(self, rank: int) -> Dual:
        """Prepend dimensions of size 1 up to `rank`, so that queries don't meet other dimensions."""
        missing = rank - len(self.shape)
        return self.reshaped((*[1] * missing, *self.shape)) if missing > 0 else self


class Interleaved(Dual):
    """A value whose tangents are stored directly before the last dimension.

    A matrix product reads and writes this layout in one call, without a copy of the other matrix for each
    query. Operators that need the queries first get them by a transposition.

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
        """Convert a dual to this layout."""
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

    def broadcastable(self, primal: Node) -> tuple[Node, Node]:
        """Return a primal [1, *shape] and the tangents in shapes that broadcast and that need no copy."""
        queries, width, writer = self.writer.queries, self.shape[-1], self.writer
        *lead, last = shape_of(_before_reshapes(self._inside))
        if last != queries * width:
            lead = [*self.shape[:-1]]
        return (
            writer.reshape(primal, [*lead, 1, width]),
            writer.reshape(self._inside, [*lead, queries, width]),
        )

    def scaled(self, primal: Node, factor: Factor = None) -> Dual:
        """See `Dual.scaled`; without a factor the tangents keep their layout."""
        if factor is None:
            return Interleaved(self.writer, primal, self._inside)
        return super().scaled(primal, factor)

    def reshaped(self, shape: Shape) -> Dual:
        """See `Dual.reshaped`; the tangents keep their layout if the last dimension keeps its size."""
        if shape[-1] != self.shape[-1]:
            return super().reshaped(shape)
        return Interleaved(self.writer, self.writer.reshape(self.primal, [1, *shape]), self._inside)

    @cached_property
    def unscaled(self) -> Node:
        """The tangents with the queries first."""
        rank = len(self.shape)
        return self.writer.call(aten.permute.default, self.inside, [rank - 1, *range(rank - 1), rank])
