"""A value of the graph with its tangents, in the form that its operator leaves it in.

    primal    [1, *shape]            the value itself, slot 0
    tangents  [queries, *shape]      its derivatives along the directions, slots 1 to queries
    stack     [1 + queries, *shape]  all slots in one tensor, for what acts on all of them in one call

    Parts         a primal, and tangents up to a factor
    Stacked       the stack
    Biased        the stack but for a bias of slot 0
    Scaled        the stack but for a number that the tangents are multiplied by
    Behind        a primal, and tangents up to a factor in a stack whose slot 0 means nothing
    Interleaved   a primal, and tangents in front of the last dimension, between products of matrices

Any form can be asked for any other, which is then made once. Two things are put off for as long as possible,
because they then cost as much as one slot instead of all: a bias, which moves slot 0 alone, and the factor
of an elementwise derivative, which is the same for every direction.
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
    """A value that depends on the adapter; each form is a subclass.

    Args:
        builder: of the graph that the value is computed in.
        shape: the value's, without slots.
    """

    factor: Factor = None
    """What `unscaled` is still to be multiplied by; None for one."""

    def __init__(self, builder: Builder, shape: Shape) -> None:
        self.builder = builder
        self.shape = shape

    @cached_property
    def primal(self) -> Node:
        """Slot 0, [1, *shape]."""
        raise NotImplementedError

    @cached_property
    def unscaled(self) -> Node:
        """The tangents before `factor`."""
        raise NotImplementedError

    @cached_property
    def tangents(self) -> Node:
        """Slots 1 to queries, [queries, *shape]."""
        tangents = self.builder.product(self.factor, self.unscaled)
        return self.builder.know_shape(tangents, self.builder.queries, *self.shape)

    @cached_property
    def stack(self) -> Node:
        """All slots, [1 + queries, *shape]."""
        return self._known_stack(self.builder.call(aten.cat.default, [self.primal, self.tangents]))

    @property
    def has_stack(self) -> bool:
        """Whether `stack` is a node already."""
        return "stack" in vars(self)

    @property
    def is_stacked(self) -> bool:
        """Whether there is a tensor of all slots already, or but for a bias."""
        return self.has_stack

    @property
    def slots(self) -> Node | None:
        """[1 + queries, *shape]: the tangents before `factor` behind a slot 0 of any value; None without."""
        return self.stack if self.has_stack and self.factor is None else None

    def behind(self, primal: Node, factor: Factor = None) -> Dual:
        """Another value of this shape: its tangents are these times `factor`, in whatever form they are."""
        factor = self.builder.product(self.factor, factor)
        return Parts(self.builder, self.shape, primal, self.unscaled, factor)

    def reshaped(self, shape: Shape) -> Dual:
        """The same numbers in another shape."""
        return self.each(shape, lambda slots, count: self.builder.reshape(slots, count, *shape))

    def each(self, shape: Shape, make: Callable[[Node, int], Node]) -> Dual:
        """Apply a linear operator to every slot; `make(slots, count)` builds it for `count` of them."""
        if self.is_stacked:
            return Stacked(self.builder, shape, make(self.stack, self.builder.slots))
        parts = make(self.primal, 1), make(self.tangents, self.builder.queries)
        return Parts(self.builder, shape, *parts)

    def aligned(self, rank: int) -> Dual:
        """The same value with dimensions of 1 in front, so that slots don't meet another's dimensions."""
        missing = rank - len(self.shape)
        return self.reshaped((*[1] * missing, *self.shape)) if missing > 0 else self

    def _known_stack(self, stack: Node) -> Node:
        return self.builder.know_shape(stack, self.builder.slots, *self.shape)


class Parts(Dual):
    """From a primal, and tangents that are still to be multiplied by `factor`."""

    def __init__(
        self, builder: Builder, shape: Shape, primal: Node, tangents: Node, factor: Factor = None
    ) -> None:
        super().__init__(builder, shape)
        self.primal = builder.know_shape(primal, 1, *shape)
        self.unscaled = builder.know_shape(tangents, builder.queries, *shape)
        self.factor = factor


class _InSlots(Dual):
    """A dual whose unscaled tangents are the slots from 1 on of one tensor."""

    def __init__(self, builder: Builder, shape: Shape, slots: Node) -> None:
        super().__init__(builder, shape)
        self._slots = self._known_stack(slots)

    @property
    def slots(self) -> Node:
        return self._slots

    @cached_property
    def primal(self) -> Node:
        return self._slot_0(self._slots)

    @cached_property
    def unscaled(self) -> Node:
        tangents = self.builder.call(aten.slice.Tensor, self._slots, 0, 1, self.builder.slots)
        return self.builder.know_shape(tangents, self.builder.queries, *self.shape)

    def behind(self, primal: Node, factor: Factor = None) -> Dual:
        factor = self.builder.product(self.factor, factor)
        return Behind(self.builder, self.shape, primal, self._slots, factor)

    def _slot_0(self, slots: Node) -> Node:
        return self.builder.know_shape(self.builder.call(aten.slice.Tensor, slots, 0, 0, 1), 1, *self.shape)


class Stacked(_InSlots):
    """From all slots in one tensor."""

    def __init__(self, builder: Builder, shape: Shape, stack: Node) -> None:
        super().__init__(builder, shape, stack)
        self.stack = stack


class Biased(_InSlots):
    """From a tensor of all slots, and `bias`, a constant of the last dimension to be added to slot 0."""

    def __init__(self, builder: Builder, shape: Shape, slots: Node, bias: Node) -> None:
        super().__init__(builder, shape, slots)
        self.bias = bias

    @property
    def is_stacked(self) -> bool:
        return True

    @cached_property
    def primal(self) -> Node:
        if self.has_stack:
            return self._slot_0(self.stack)
        primal = self.builder.call(aten.add.Tensor, self._slot_0(self._slots), self.bias)
        return self.builder.know_shape(primal, 1, *self.shape)

    @cached_property
    def stack(self) -> Node:
        bias = self.builder.in_slot_0(self.bias, len(self.shape))
        return self._known_stack(self.builder.call(aten.add.Tensor, self._slots, bias))


class Scaled(_InSlots):
    """From a tensor of all slots, whose tangents are still to be multiplied by a number."""

    def __init__(self, builder: Builder, shape: Shape, slots: Node, factor: Number) -> None:
        super().__init__(builder, shape, slots)
        self.factor: Number = factor

    def each(self, shape: Shape, make: Callable[[Node, int], Node]) -> Dual:
        if self.is_stacked:
            return super().each(shape, make)
        return Scaled(self.builder, shape, make(self._slots, self.builder.slots), self.factor)


class Behind(_InSlots):
    """From a primal, and tangents, still to be multiplied by `factor`, behind a slot 0 of any value."""

    def __init__(self, builder: Builder, shape: Shape, primal: Node, slots: Node, factor: Factor) -> None:
        super().__init__(builder, shape, slots)
        self.primal = builder.know_shape(primal, 1, *shape)
        self.factor = factor


class Interleaved(Dual):
    """From a primal, and tangents that stand in front of the last dimension.

    A product of matrices makes and takes them so in one call, without a copy of the other matrix for each.
    What wants slots in front gets them, at the price of a transposition.

    Args:
        inside: the tangents [*shape[:-1], queries, shape[-1]], in any shape that the builder knows.
    """

    def __init__(self, builder: Builder, shape: Shape, primal: Node, inside: Node) -> None:
        super().__init__(builder, shape)
        self.primal = builder.know_shape(primal, 1, *shape)
        self._inside = inside

    @classmethod
    def of(cls, dual: Dual) -> Interleaved:
        """Any dual in this form."""
        if isinstance(dual, Interleaved):
            return dual
        builder, rank = dual.builder, len(dual.shape)
        *lead, width = dual.shape
        order = [*range(1, rank), 0, rank]
        if not dual.is_stacked:
            tangents = builder.call(aten.permute.default, dual.tangents, order)
            builder.know_shape(tangents, *lead, builder.queries, width)
            return cls(builder, dual.shape, dual.primal, tangents)
        slots = builder.call(aten.permute.default, dual.stack, order)
        builder.know_shape(slots, *lead, builder.slots, width)
        flat = builder.reshape(slots, *lead, builder.slots * width)
        primal = builder.call(aten.slice.Tensor, flat, rank - 1, 0, width)
        tangents = builder.call(aten.slice.Tensor, flat, rank - 1, width, builder.slots * width)
        builder.know_shape(primal, *lead, width)
        builder.know_shape(tangents, *lead, builder.queries * width)
        return cls(builder, dual.shape, builder.reshape(primal, 1, *dual.shape), tangents)

    @property
    def inside(self) -> Node:
        """The tangents, [*shape[:-1], queries, shape[-1]]."""
        return self.builder.reshape(self._inside, *self.shape[:-1], self.builder.queries, self.shape[-1])

    def beside(self, primal: Node) -> tuple[Node, Node, Shape]:
        """Numbers [1, *shape] and the tangents in shapes that meet, and the tangents' own shape."""
        queries, width, builder = self.builder.queries, self.shape[-1], self.builder
        lying = builder.shape_as_it_lies(self._inside)
        lead = lying[:-1] if lying[-1] == queries * width else self.shape[:-1]
        # Without a dimension of one query, both stay as products of matrices have them.
        shape = (*lead, queries, width) if queries > 1 else (*lead, width)
        other = (*lead, 1, width) if queries > 1 else shape
        return builder.reshape(primal, *other), builder.reshape(self._inside, *shape), shape

    def behind(self, primal: Node, factor: Factor = None) -> Dual:
        if factor is None:
            return Interleaved(self.builder, self.shape, primal, self._inside)
        return super().behind(primal, factor)

    def reshaped(self, shape: Shape) -> Dual:
        # A last dimension that stays leaves the tangents in front of it.
        if shape[-1] != self.shape[-1]:
            return super().reshaped(shape)
        return Interleaved(self.builder, shape, self.builder.reshape(self.primal, 1, *shape), self._inside)

    def each(self, shape: Shape, make: Callable[[Node, int], Node]) -> Dual:
        if self.builder.is_apart:
            return super().each(shape, make)
        return Stacked(self.builder, shape, make(self.stack, self.builder.slots))

    @cached_property
    def unscaled(self) -> Node:
        return self._in_front(self.inside, self.builder.queries)

    @cached_property
    def stack(self) -> Node:
        *lead, width = self.shape
        builder = self.builder
        widths = width, builder.queries * width
        joined = builder.joined((self.primal, self._inside), widths, tuple(lead))
        return self._in_front(builder.reshape(joined, *lead, builder.slots, width), builder.slots)

    def _in_front(self, inside: Node, count: int) -> Node:
        rank = len(self.shape)
        node = self.builder.call(aten.permute.default, inside, [rank - 1, *range(rank - 1), rank])
        return self.builder.know_shape(node, count, *self.shape)
