"""Writes the new graph: operators, and the constants and shapes that it remembers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from server_export.ir.writer import part_of_sum

aten = torch.ops.aten

Number = float | int


class Builder:
    """Appends operators to the new graph. No constant's shape depends on rows, tokens or queries.

    Args:
        graph_module: where constants are kept.
        graph: the graph to append to.
        queries: tangents of every value.
        ones: inputs f32 [1, length, 1] of ones, by length.
    """

    def __init__(
        self, graph_module: GraphModule, graph: Graph, queries: int, ones: Mapping[int, Node]
    ) -> None:
        self.graph_module = graph_module
        self.graph = graph
        self.queries = queries
        self._ones = ones
        self._constants: dict[Any, Node] = {}
        self._shapes: dict[Node, tuple[int, ...]] = {}
        self._reshaped: dict[tuple[Node, tuple[int, ...]], Node] = {}
        for length, node in ones.items():
            self.know_shape(node, 1, length, 1)

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

    def know_shape(self, node: Node, *shape: int) -> Node:
        """The node, whose shape is noted, so that reshaping it to the same one costs nothing."""
        self._shapes[node] = shape
        return node

    def reshape(self, source: Node, *shape: int) -> Node:
        """The same numbers in another shape: none, one or an earlier operator."""
        source = self._as_it_lies(source)
        if self._shapes.get(source) == shape:
            return source
        if (source, shape) not in self._reshaped:
            node = self.call(aten.reshape.default, source, list(shape))
            self._reshaped[source, shape] = self.know_shape(node, *shape)
        return self._reshaped[source, shape]

    def shape_as_it_lies(self, source: Node) -> tuple[int, ...]:
        """The shape of a value before it was reshaped, which must be known."""
        return self._shapes[self._as_it_lies(source)]

    def _as_it_lies(self, source: Node) -> Node:
        """A value before it was reshaped, as far as shapes are known."""
        while source.target is aten.reshape.default and source.args[0] in self._shapes:
            source = source.args[0]
        return source

    def product(self, left: Node | Number | None, right: Node | Number | None) -> Any:
        """left * right of nodes, numbers, or None for one."""
        if left is None or right is None:
            return right if left is None else left
        if isinstance(left, Node):
            return self.call(aten.mul.Tensor, left, right)
        return self.call(aten.mul.Tensor, right, left) if isinstance(right, Node) else left * right

    def total(self, source: Node, *shape: int) -> Node:
        """Sum over the last dimension of a value of `shape`, kept as 1.

        Layers of ones stay in the delegate.
        """
        *lead, width = shape
        if width in self._ones:
            rows = self.reshape(source, 1, math.prod(lead), width)
            sums = self.call(aten.bmm.default, rows, self._ones[width])
            return self.reshape(self.know_shape(sums, 1, math.prod(lead), 1), *lead, 1)
        part = part_of_sum(width)
        if part < width:
            parts = self.total(self.reshape(source, *lead, width // part, part), *lead, width // part, part)
            return self.total(self.reshape(parts, *lead, width // part), *lead, width // part)
        return self.know_shape(self.call(aten.linear.default, source, self.ones(1, width)), *lead, 1)
