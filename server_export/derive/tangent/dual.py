"""A value of the graph with its tangents, in the form that its operator leaves it in.

    primal     [1, *shape]            the value itself
    tangents   [queries, *shape]      its derivatives along the directions

The factor of an elementwise derivative is the same for every direction: it is put off for as long as
possible, because factors then meet each other before they meet the tangents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeAlias

from torch.fx import Node

from server_export.derive.tangent.builder import Builder, Number, aten

Shape = tuple[int, ...]
Factor: TypeAlias = Node | Number | None


class Dual:
    """A value that depends on the adapter.

    Args:
        builder: of the graph that the value is computed in.
        shape: the value's.
        primal: the value, [1, *shape].
        unscaled: the tangents [queries, *shape], still to be multiplied by `factor`.
        factor: None for one.
    """

    def __init__(
        self, builder: Builder, shape: Shape, primal: Node, unscaled: Node, factor: Factor = None
    ) -> None:
        self.builder = builder
        self.shape = shape
        self.primal = builder.know_shape(primal, 1, *shape)
        self.unscaled = builder.know_shape(unscaled, builder.queries, *shape)
        self.factor = factor

    @cached_property
    def tangents(self) -> Node:
        """The tangents, [queries, *shape]."""
        tangents = self.builder.product(self.factor, self.unscaled)
        return self.builder.know_shape(tangents, self.builder.queries, *self.shape)

    def behind(self, primal: Node, factor: Factor = None) -> Dual:
        """Another value of this shape: its tangents are these times `factor`."""
        factor = self.builder.product(self.factor, factor)
        return Dual(self.builder, self.shape, primal, self.unscaled, factor)

    def reshaped(self, shape: Shape) -> Dual:
        """The same numbers in another shape."""
        return self.each(shape, lambda part, count: self.builder.reshape(part, count, *shape))

    def each(self, shape: Shape, make: Callable[[Node, int], Node]) -> Dual:
        """A linear operator of value and tangents; `make(part, count)` builds it for `count` of them."""
        parts = make(self.primal, 1), make(self.tangents, self.builder.queries)
        return Dual(self.builder, shape, *parts)

    def aligned(self, rank: int) -> Dual:
        """The same value with dimensions of 1 in front, so that queries don't meet another's dimensions."""
        missing = rank - len(self.shape)
        return self.reshaped((*[1] * missing, *self.shape)) if missing > 0 else self


class Interleaved(Dual):
    """From a primal, and tangents that stand in front of the last dimension.

    A product of matrices makes and takes them so in one call, without a copy of the other matrix for each.
    What wants queries in front gets them, at the price of a transposition.

    Args:
        inside: the tangents [*shape[:-1], queries, shape[-1]], in any shape that the builder knows.
    """

    def __init__(self, builder: Builder, shape: Shape, primal: Node, inside: Node) -> None:
        self.builder = builder
        self.shape = shape
        self.primal = builder.know_shape(primal, 1, *shape)
        self.factor = None
        self._inside = inside

    @classmethod
    def of(cls, dual: Dual) -> Interleaved:
        """Any dual in this form."""
        if isinstance(dual, Interleaved):
            return dual
        builder, rank = dual.builder, len(dual.shape)
        inside = builder.call(aten.permute.default, dual.tangents, [*range(1, rank), 0, rank])
        builder.know_shape(inside, *dual.shape[:-1], builder.queries, dual.shape[-1])
        return cls(builder, dual.shape, dual.primal, inside)

    @property
    def inside(self) -> Node:
        """The tangents, [*shape[:-1], queries, shape[-1]]."""
        return self.builder.reshape(self._inside, *self.shape[:-1], self.builder.queries, self.shape[-1])

    def beside(self, primal: Node) -> tuple[Node, Node, Shape]:
        """Numbers [1, *shape] and the tangents in shapes that meet, and the tangents' own shape."""
        queries, width, builder = self.builder.queries, self.shape[-1], self.builder
        lying = builder.shape_as_it_lies(self._inside)
        lead = lying[:-1] if lying[-1] == queries * width else self.shape[:-1]
        shape = (*lead, queries, width)
        return builder.reshape(primal, *lead, 1, width), builder.reshape(self._inside, *shape), shape

    def behind(self, primal: Node, factor: Factor = None) -> Dual:
        """Another value of this shape: its tangents are these times `factor`, where they are without one."""
        if factor is None:
            return Interleaved(self.builder, self.shape, primal, self._inside)
        return super().behind(primal, factor)

    def reshaped(self, shape: Shape) -> Dual:
        """The same numbers in another shape; tangents stay in front of a last dimension that stays."""
        if shape[-1] != self.shape[-1]:
            return super().reshaped(shape)
        return Interleaved(self.builder, shape, self.builder.reshape(self.primal, 1, *shape), self._inside)

    @cached_property
    def unscaled(self) -> Node:
        """The tangents with queries in front."""
        rank = len(self.shape)
        order = [rank - 1, *range(rank - 1), rank]
        node = self.builder.call(aten.permute.default, self.inside, order)
        return self.builder.know_shape(node, self.builder.queries, *self.shape)
