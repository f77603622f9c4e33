"""A value of the graph with its tangents, and the graph that grows out of them.

    primal    [1, *shape]            the value itself, slot 0
    tangents  [queries, *shape]      its derivatives along the directions, slots 1 to queries
    stack     [1 + queries, *shape]  all slots in one tensor, for what acts on all of them in one call

Between two products of matrices the tangents stand in front of the last dimension instead (`Interleaved`).
Each form is made from the others when it is first asked for. Two things are put off for as long as possible,
because they then cost as much as one slot instead of all: a bias, which moves slot 0 alone, and the factor
of an elementwise derivative, which is the same for every direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

# Numbers that are added up in one step, and those that are worth one of their own.
_LONGEST_SUM = 1024
_SHORTEST_SUM = 32

Number = float | int


class Builder:
    """Appends operators to the new graph.

    Args:
        graph_module: where constants are kept.
        graph: the graph to append to.
        queries: tangents of every value.
    """

    def __init__(self, graph_module: GraphModule, graph: Graph, queries: int) -> None:
        self.graph_module = graph_module
        self.graph = graph
        self.queries = queries
        self._constants: dict[Any, Node] = {}
        self._shapes: dict[Node, tuple[int, ...]] = {}
        self._reshaped: dict[tuple[Node, tuple[int, ...]], Node] = {}
        self._numbers: dict[Node, tuple[Node, Number]] = {}

    @property
    def slots(self) -> int:
        """The primal and its tangents."""
        return 1 + self.queries

    def call(self, target: Any, *arguments: Any, **named: Any) -> Node:
        """One operator."""
        return self.graph.call_function(target, arguments, named)

    def constant(self, tensor: torch.Tensor, key: Any) -> Node:
        """A constant of the program; the same key gives the same node."""
        if key not in self._constants:
            name = f"tangent_constant_{len(self._constants)}"
            self.graph_module.register_buffer(name, tensor)
            self._constants[key] = self.graph.get_attr(name)
            self.know_shape(self._constants[key], *tensor.shape)
        return self._constants[key]

    def ones(self, *shape: int) -> Node:
        """A constant of ones."""
        return self.constant(torch.ones(shape), ("ones", shape))

    def zeros(self, *shape: int) -> Node:
        """A constant of zeros."""
        return self.constant(torch.zeros(shape), ("zeros", shape))

    def tangents_only(self, shape: tuple[int, ...], number: Number = 1) -> Node:
        """A constant that makes slot 0 of a product with [1, *shape] zero, the others `number` times it.

        It has a number for every row: with one for a slot, XNNPACK would give its threads whole slots.
        """
        lead = [1] * (len(shape) - 2) + list(shape[-2:-1])
        mask = torch.full((self.slots, *lead, 1), float(number))
        mask[0] = 0
        return self.constant(mask, ("tangents only", tuple(lead), float(number)))

    def know_shape(self, node: Node | None, *shape: int) -> None:
        """Note the shape of a node, so that reshaping it to the same one costs nothing."""
        if node is not None:
            self._shapes[node] = shape

    def reshape(self, source: Node, *shape: int) -> Node:
        """The same numbers in another shape: none, one or an earlier operator."""
        source = self.as_it_lies(source)
        if self._shapes.get(source) == shape:
            return source
        if (source, shape) not in self._reshaped:
            node = self.call(aten.reshape.default, source, list(shape))
            self._reshaped[source, shape] = node
            self.know_shape(node, *shape)
        return self._reshaped[source, shape]

    def as_it_lies(self, source: Node) -> Node:
        """A value before it was reshaped, as far as shapes are known."""
        while source.target is aten.reshape.default and source.args[0] in self._shapes:
            source = source.args[0]
        return source

    def shape_as_it_lies(self, source: Node) -> tuple[int, ...]:
        """The shape of a value before it was reshaped, which must be known."""
        return self._shapes[self.as_it_lies(source)]

    def joined(self, parts: Sequence[Node], widths: Sequence[int], shape: tuple[int, ...]) -> Node:
        """Values [*shape, width] side by side in their last dimension, [..., sum of widths].

        If they lie alike in another shape, they are joined as they lie.
        """
        lying = [self.as_it_lies(part) for part in parts]
        leads = {self._shapes[node][:-1] for node in lying if node in self._shapes}
        ends = [self._shapes[node][-1] for node in lying if node in self._shapes]
        if len(leads) == 1 and ends == list(widths):
            (shape,) = leads
        else:
            lying = [self.reshape(part, *shape, width) for part, width in zip(parts, widths, strict=True)]
        node = self.call(aten.cat.default, lying, len(shape))
        self.know_shape(node, *shape, sum(widths))
        return node

    def product(self, left: Node | Number | None, right: Node | Number | None) -> Any:
        """left * right of nodes, numbers, or None for one."""
        if left is None or right is None:
            return right if left is None else left
        if isinstance(left, Node) and isinstance(right, Node):
            return self.call(aten.mul.Tensor, left, right)
        (first, one), (second, other) = self.apart(left), self.apart(right)
        source = first if second is None else second
        if source is None:
            return one * other
        node = self.call(aten.mul.Tensor, source, one * other)
        self._numbers[node] = source, one * other
        return node

    def apart(self, value: Node | Number | None) -> tuple[Node | None, Number]:
        """A product's node, None for one, and the number that it is multiplied by."""
        if isinstance(value, Node):
            return self._numbers.get(value, (value, 1))
        return None, 1 if value is None else value

    def total(self, source: Node, *shape: int) -> Node:
        """Sum over the last dimension of a value of `shape`, kept as 1.

        A linear layer of ones stays in the delegate. A vocabulary is added up in two of them: XNNPACK pads a
        layer's outputs to as many as a vector holds, and would read megabytes of weights for one.
        """
        *lead, width = shape
        part = max(size for size in range(1, _LONGEST_SUM + 1) if width % size == 0)
        if width > _LONGEST_SUM and part >= _SHORTEST_SUM:
            parts = self.total(self.reshape(source, *lead, width // part, part), *lead, width // part, part)
            return self.total(self.reshape(parts, *lead, width // part), *lead, width // part)
        node = self.call(aten.linear.default, source, self.ones(1, width))
        self.know_shape(node, *lead, 1)
        return node

    def repeated(self, source: Node, each: Node, shape: tuple[int, ...]) -> Node:
        """A value of `shape` times every number of `each`, [times, *shape].

        `each` is a constant [times, 1, ...] with one dimension more than `shape`.
        """
        copies = self.call(aten.mul.Tensor, self.reshape(source, *shape), each)
        self.know_shape(copies, self._shapes[each][0], *shape)
        return copies


class Dual:
    """A value that depends on the adapter; made by `stacked`, `of_parts` or `behind`."""

    def __init__(
        self,
        builder: Builder,
        shape: tuple[int, ...],
        *,
        slots: Node | None = None,
        holds_primal: bool = False,
        bias: Node | None = None,
        primal: Node | None = None,
        tangents: Node | None = None,
        factor: Node | Number | None = None,
    ) -> None:
        self.builder = builder
        self.shape = shape
        self._slots, self._holds_primal, self._bias = slots, holds_primal, bias
        self._stack = slots if holds_primal and bias is None and factor is None else None
        self._primal = primal
        self._unscaled, self._factor = tangents, factor
        self._tangents = tangents if factor is None else None
        builder.know_shape(slots, builder.slots, *shape)
        builder.know_shape(primal, 1, *shape)
        builder.know_shape(tangents, builder.queries, *shape)

    @classmethod
    def stacked(
        cls,
        builder: Builder,
        shape: tuple[int, ...],
        stack: Node,
        bias: Node | None = None,
        factor: Number | None = None,
    ) -> Dual:
        """From all slots in one; `bias`, a constant of the last dimension, is still to be added to slot 0.

        The tangents are still to be multiplied by `factor`.
        """
        return cls(builder, shape, slots=stack, holds_primal=True, bias=bias, factor=factor)

    @classmethod
    def of_parts(
        cls,
        builder: Builder,
        shape: tuple[int, ...],
        primal: Node,
        tangents: Node,
        factor: Node | Number | None = None,
    ) -> Dual:
        """From a primal and tangents, which are still to be multiplied by `factor`."""
        return cls(builder, shape, primal=primal, tangents=tangents, factor=factor)

    def behind(self, primal: Node, factor: Node | Number | None = None) -> Dual:
        """Another value of this shape: its tangents are these times `factor`, in whatever form they are."""
        factor = self.builder.product(self._factor, factor)
        if self._slots is not None:
            return Dual(self.builder, self.shape, slots=self._slots, primal=primal, factor=factor)
        return Dual.of_parts(self.builder, self.shape, primal, self.unscaled, factor)

    @property
    def is_stacked(self) -> bool:
        """Whether there is a tensor of all slots already, or but for a bias."""
        return self._stack is not None or (self._holds_primal and self._factor is None)

    @property
    def slots(self) -> Node | None:
        """[1 + queries, *shape]: the tangents before `factor` behind a slot 0 of any value; None without."""
        return self._slots if self._slots is not None else self._stack

    @property
    def primal(self) -> Node:
        """Slot 0, [1, *shape]."""
        if self._primal is None:
            assert self._slots is not None
            self._primal = self.builder.call(aten.slice.Tensor, self._stack or self._slots, 0, 0, 1)
            if self._bias is not None and self._stack is None:
                self._primal = self.builder.call(aten.add.Tensor, self._primal, self._bias)
            self.builder.know_shape(self._primal, 1, *self.shape)
        return self._primal

    @property
    def tangents(self) -> Node:
        """Slots 1 to queries, [queries, *shape]."""
        if self._tangents is None:
            self._tangents = self.builder.product(self._factor, self.unscaled)
            self.builder.know_shape(self._tangents, self.builder.queries, *self.shape)
        return self._tangents

    @property
    def unscaled(self) -> Node:
        """The tangents before `factor`."""
        if self._unscaled is None:
            assert self._slots is not None
            self._unscaled = self.builder.call(aten.slice.Tensor, self._slots, 0, 1, self.builder.slots)
            self.builder.know_shape(self._unscaled, self.builder.queries, *self.shape)
        return self._unscaled

    @property
    def factor(self) -> Node | Number | None:
        """What `unscaled` is still to be multiplied by; None for one."""
        return self._factor

    @property
    def stack(self) -> Node:
        """All slots, [1 + queries, *shape]."""
        if self._stack is None:
            if self.is_stacked:
                self._stack = self.builder.call(aten.add.Tensor, self._slots, self._padded_bias())
            else:
                self._stack = self.builder.call(aten.cat.default, [self.primal, self.tangents])
            self.builder.know_shape(self._stack, self.builder.slots, *self.shape)
        return self._stack

    def reshaped(self, shape: tuple[int, ...]) -> Dual:
        """The same numbers in another shape."""
        return self.each(shape, lambda slots, count: self.builder.reshape(slots, count, *shape))

    def each(self, shape: tuple[int, ...], make: Callable[[Node, int], Node]) -> Dual:
        """Apply a linear operator to every slot; `make(slots, count)` builds it for `count` of them."""
        if self.is_stacked:
            return Dual.stacked(self.builder, shape, make(self.stack, self.builder.slots))
        if self._holds_primal and self._bias is None and not isinstance(self._factor, Node):
            assert self._slots is not None
            slots = make(self._slots, self.builder.slots)
            return Dual.stacked(self.builder, shape, slots, factor=self._factor)
        parts = make(self.primal, 1), make(self.tangents, self.builder.queries)
        return Dual.of_parts(self.builder, shape, *parts)

    def aligned(self, rank: int) -> Dual:
        """The same value with dimensions of 1 in front, so that slots don't meet another's dimensions."""
        missing = rank - len(self.shape)
        return self.reshaped((*[1] * missing, *self.shape)) if missing > 0 else self

    def _padded_bias(self) -> Node:
        """The bias for slot 0 and zeros for the others, [1 + queries, 1, ..., width]."""
        assert self._bias is not None
        bias = self.builder.graph_module
        for name in str(self._bias.target).split("."):
            bias = getattr(bias, name)
        assert isinstance(bias, torch.Tensor)
        shape = (self.builder.slots, *[1] * (len(self.shape) - 1), bias.shape[-1])
        padded = torch.zeros(shape, dtype=bias.dtype)
        padded[0] = bias.detach()
        return self.builder.constant(padded, ("bias", str(self._bias.target), len(self.shape)))


class Interleaved(Dual):
    """A dual whose tangents stand in front of the last dimension.

    A product of matrices makes and takes them so in one call, without a copy of the other matrix for each.
    What wants slots in front gets them, at the price of a transposition.

    Args:
        inside: the tangents [*shape[:-1], queries, shape[-1]], in any shape that the builder knows.
    """

    def __init__(self, builder: Builder, shape: tuple[int, ...], primal: Node, inside: Node) -> None:
        super().__init__(builder, shape, primal=primal)
        self._inside = inside

    @classmethod
    def of(cls, dual: Dual) -> Interleaved:
        """Any dual in this form."""
        if isinstance(dual, Interleaved):
            return dual
        builder, rank = dual.builder, len(dual.shape)
        order = [*range(1, rank), 0, rank]
        if not dual.is_stacked:
            tangents = builder.call(aten.permute.default, dual.tangents, order)
            builder.know_shape(tangents, *dual.shape[:-1], builder.queries, dual.shape[-1])
            return cls(builder, dual.shape, dual.primal, tangents)
        slots = builder.call(aten.permute.default, dual.stack, order)
        *lead, width = dual.shape
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

    def beside(self, primal: Node) -> tuple[Node, Node, tuple[int, ...]]:
        """Numbers [1, *shape] and the tangents in shapes that meet, and the tangents' own shape."""
        queries, width, builder = self.builder.queries, self.shape[-1], self.builder
        lying = builder.shape_as_it_lies(self._inside)
        lead = lying[:-1] if lying[-1] == queries * width else self.shape[:-1]
        # Without a dimension of one query, both stay as products of matrices have them.
        shape = (*lead, queries, width) if queries > 1 else (*lead, width)
        other = (*lead, 1, width) if queries > 1 else shape
        return builder.reshape(primal, *other), builder.reshape(self._inside, *shape), shape

    def behind(self, primal: Node, factor: Node | Number | None = None) -> Dual:
        """See Dual.behind."""
        if factor is None:
            self.builder.know_shape(primal, 1, *self.shape)
            return Interleaved(self.builder, self.shape, primal, self._inside)
        return super().behind(primal, factor)

    def reshaped(self, shape: tuple[int, ...]) -> Dual:
        """See Dual.reshaped; a last dimension that stays leaves the tangents in front of it."""
        if shape[-1] != self.shape[-1]:
            return super().reshaped(shape)
        return Interleaved(self.builder, shape, self.builder.reshape(self.primal, 1, *shape), self._inside)

    def each(self, shape: tuple[int, ...], make: Callable[[Node, int], Node]) -> Dual:
        """See Dual.each."""
        return Dual.stacked(self.builder, shape, make(self.stack, self.builder.slots))

    @property
    def unscaled(self) -> Node:
        """The tangents, [queries, *shape]."""
        if self._unscaled is None:
            self._unscaled = self._in_front(self.inside, self.builder.queries)
        return self._unscaled

    @property
    def stack(self) -> Node:
        """All slots, [1 + queries, *shape]."""
        if self._stack is None:
            *lead, width = self.shape
            builder = self.builder
            widths = width, builder.queries * width
            joined = builder.joined((self.primal, self._inside), widths, tuple(lead))
            slots = builder.reshape(joined, *lead, builder.slots, width)
            self._stack = self._in_front(slots, builder.slots)
        return self._stack

    def _in_front(self, inside: Node, count: int) -> Node:
        rank = len(self.shape)
        node = self.builder.call(aten.permute.default, inside, [rank - 1, *range(rank - 1), rank])
        self.builder.know_shape(node, count, *self.shape)
        return node


def size(shape: tuple[int, ...] | torch.Size) -> int:
    """How many numbers a tensor of this shape holds."""
    return math.prod(shape)
