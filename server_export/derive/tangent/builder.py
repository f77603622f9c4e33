"""Writes the new graph: operators, and the constants, shapes and products of numbers that it remembers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from server_export.graph.modules import attribute

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
        slot_mask: an input f32 [1 + queries, 1, tokens, 1], 0 in slot 0 and 1 in the others. With it, no
            constant's shape depends on the number of slots or tokens.
        tokens: of `slot_mask`.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        graph: Graph,
        queries: int,
        slot_mask: Node | None = None,
        tokens: int = 0,
    ) -> None:
        self.graph_module = graph_module
        self.graph = graph
        self.queries = queries
        self.slot_mask = slot_mask
        self.tokens = tokens
        self._constants: dict[Any, Node] = {}
        self._shapes: dict[Node, tuple[int, ...]] = {}
        self._reshaped: dict[tuple[Node, tuple[int, ...]], Node] = {}
        self._numbers: dict[Node, tuple[Node, Number]] = {}
        self._made: dict[Any, Node] = {}
        if slot_mask is not None:
            self.know_shape(slot_mask, self.slots, 1, tokens, 1)

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
            self._constants[key] = self.know_shape(self.graph.get_attr(name), *tensor.shape)
        return self._constants[key]

    def ones(self, *shape: int) -> Node:
        """A constant of ones."""
        return self.constant(torch.ones(shape), ("ones", shape))

    def zeros(self, *shape: int) -> Node:
        """A constant of zeros."""
        return self.constant(torch.zeros(shape), ("zeros", shape))

    def tangents_only(self, shape: tuple[int, ...], number: Number = 1) -> Node:
        """What makes slot 0 of a product with [1, *shape] zero, the others `number` times it.

        It has a number for every row: with one for a slot, XNNPACK would give its threads whole slots.
        """
        if self.slot_mask is None:
            lead = [1] * (len(shape) - 2) + list(shape[-2:-1])
            mask = torch.full((self.slots, *lead, 1), float(number))
            mask[0] = 0
            return self.constant(mask, ("tangents only", tuple(lead), float(number)))
        lead, source = [1] * (len(shape) - 1), self.slot_mask
        if self.tokens in shape[:-1]:
            lead[shape.index(self.tokens)] = self.tokens
        else:
            source = self._number_per_slot()
        node = self.reshape(source, self.slots, *lead, 1)
        return node if number == 1 else self._once((node, number), lambda: self.product(node, number))

    def in_slot_0(self, vector: Node, rank: int) -> Node:
        """The constant `vector` [width] in slot 0, zeros in the others: [slots, 1, ..., width].

        Args:
            vector: a get_attr node.
            rank: dimensions of the values that it is added to, without slots.
        """
        name = str(vector.target)
        if self.slot_mask is None:
            tensor: torch.Tensor = attribute(self.graph_module, name).detach()
            padded = torch.zeros(self.slots, *[1] * (rank - 1), tensor.shape[-1], dtype=tensor.dtype)
            padded[0] = tensor
            return self.constant(padded, ("slot 0", name, rank))
        first = self._once("slot 0", self._one_in_slot_0)
        first = self.reshape(first, self.slots, *[1] * rank)
        return self._once(("slot 0", name, rank), lambda: self.call(aten.mul.Tensor, first, vector))

    def _number_per_slot(self) -> Node:
        """`slot_mask` of one token, [1 + queries, 1, 1, 1]."""
        node = self._once("number per slot", lambda: self.call(aten.slice.Tensor, self.slot_mask, 2, 0, 1))
        return self.know_shape(node, self.slots, 1, 1, 1)

    def _one_in_slot_0(self) -> Node:
        """1 in slot 0 and 0 in the others, [1 + queries, 1, 1, 1]."""
        node = self.call(aten.add.Tensor, self.product(self._number_per_slot(), -1.0), 1.0)
        return self.know_shape(node, self.slots, 1, 1, 1)

    def _one_per_token(self) -> Node:
        """Ones [1, tokens, 1]: `slot_mask` of the first tangent."""
        node = self._once("one per token", lambda: self.call(aten.slice.Tensor, self.slot_mask, 0, 1, 2))
        return self.reshape(self.know_shape(node, 1, 1, self.tokens, 1), 1, self.tokens, 1)

    def _once(self, key: Any, make: Callable[[], Node]) -> Node:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def know_shape(self, node: Node, *shape: int) -> Node:
        """The node, whose shape is noted, so that reshaping it to the same one costs nothing."""
        self._shapes[node] = shape
        return node

    def reshape(self, source: Node, *shape: int) -> Node:
        """The same numbers in another shape: none, one or an earlier operator."""
        source = self.as_it_lies(source)
        if self._shapes.get(source) == shape:
            return source
        if (source, shape) not in self._reshaped:
            node = self.call(aten.reshape.default, source, list(shape))
            self._reshaped[source, shape] = self.know_shape(node, *shape)
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
        return self.know_shape(self.call(aten.cat.default, lying, len(shape)), *shape, sum(widths))

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
        if self.slot_mask is not None and width == self.tokens:
            rows = self.reshape(source, 1, math.prod(lead), width)
            sums = self.call(aten.bmm.default, rows, self._one_per_token())
            return self.reshape(self.know_shape(sums, 1, math.prod(lead), 1), *lead, 1)
        part = max(size for size in range(1, _LONGEST_SUM + 1) if width % size == 0)
        if width > _LONGEST_SUM and part >= _SHORTEST_SUM:
            parts = self.total(self.reshape(source, *lead, width // part, part), *lead, width // part, part)
            return self.total(self.reshape(parts, *lead, width // part), *lead, width // part)
        return self.know_shape(self.call(aten.linear.default, source, self.ones(1, width)), *lead, 1)
