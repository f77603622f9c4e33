"""Writes the new graph: operators, and the constants, shapes and products of numbers that it remembers."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        ones: an input f32 [1, tokens, 1] of ones. With it, a value and its tangents stay in tensors of their
            own, and no constant's shape depends on rows, tokens or queries.
        tokens: of `ones`.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        graph: Graph,
        queries: int,
        ones: Node | None = None,
        tokens: int = 0,
    ) -> None:
        self.graph_module = graph_module
        self.graph = graph
        self.queries = queries
        self.one_per_token = ones
        self.tokens = tokens
        self._constants: dict[Any, Node] = {}
        self._shapes: dict[Node, tuple[int, ...]] = {}
        self._reshaped: dict[tuple[Node, tuple[int, ...]], Node] = {}
        self._numbers: dict[Node, tuple[Node, Number]] = {}
        if ones is not None:
            self.know_shape(ones, 1, tokens, 1)

    @property
    def is_apart(self) -> bool:
        """Whether values and their tangents never share a tensor."""
        return self.one_per_token is not None

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
        lead = [1] * (len(shape) - 2) + list(shape[-2:-1])
        mask = torch.full((self.slots, *lead, 1), float(number))
        mask[0] = 0
        return self.constant(mask, ("tangents only", tuple(lead), float(number)))

    def in_slot_0(self, vector: Node, rank: int) -> Node:
        """The constant `vector` [width] in slot 0, zeros in the others: [slots, 1, ..., width].

        Args:
            vector: a get_attr node.
            rank: dimensions of the values that it is added to, without slots.
        """
        name = str(vector.target)
        tensor: torch.Tensor = attribute(self.graph_module, name).detach()
        padded = torch.zeros(self.slots, *[1] * (rank - 1), tensor.shape[-1], dtype=tensor.dtype)
        padded[0] = tensor
        return self.constant(padded, ("slot 0", name, rank))

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
        if self.is_apart and width == self.tokens:
            rows = self.reshape(source, 1, math.prod(lead), width)
            sums = self.call(aten.bmm.default, rows, self.one_per_token)
            return self.reshape(self.know_shape(sums, 1, math.prod(lead), 1), *lead, 1)
        part = max(size for size in range(1, _LONGEST_SUM + 1) if width % size == 0)
        if width > _LONGEST_SUM and part >= _SHORTEST_SUM:
            parts = self.total(self.reshape(source, *lead, width // part, part), *lead, width // part, part)
            return self.total(self.reshape(parts, *lead, width // part), *lead, width // part)
        return self.know_shape(self.call(aten.linear.default, source, self.ones(1, width)), *lead, 1)
