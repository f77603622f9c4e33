"""Writing operators into a graph, and rules by which they take the place of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from server_export.ir.constants import GraphConstants
from server_export.ir.shapes import OperatorShapes, to_meta

aten = torch.ops.aten

# Numbers that are added up in one step, and those that are worth one of their own.
_LONGEST_SUM = 1024
_SHORTEST_SUM = 32

Rule = Callable[..., Node | None]


class Calls:
    """Operators by short names: a formula in them is written into a graph, or computed at once."""

    def call(self, target: Any, *arguments: Any, **named: Any) -> Any:
        """One operator."""
        raise NotImplementedError

    def times(self, left: Any, right: Any) -> Any:
        """A product."""
        return self.call(aten.mul.Tensor, left, right)

    def plus(self, left: Any, right: Any) -> Any:
        """A sum."""
        return self.call(aten.add.Tensor, left, right)

    def minus(self, left: Any, right: Any) -> Any:
        """A difference."""
        return self.call(aten.sub.Tensor, left, right)

    def negative(self, source: Any) -> Any:
        """-x."""
        return self.call(aten.neg.default, source)

    def reciprocal(self, source: Any) -> Any:
        """1 / x."""
        return self.call(aten.reciprocal.default, source)

    def exp(self, source: Any) -> Any:
        """e to the power of x."""
        return self.call(aten.exp.default, source)

    def sigmoid(self, source: Any) -> Any:
        """1 / (1 + exp(-x))."""
        return self.call(aten.sigmoid.default, source)


class Eager(Calls):
    """Computes operators of tensors."""

    def call(self, target: Any, *arguments: Any, **named: Any) -> Any:
        """See `Calls`."""
        return target(*arguments, **named)


class GraphWriter(Calls):
    """Writes operators into a graph; every new node gets its `meta["val"]`.

        writer = GraphWriter(graph_module)
        writer.replace(node, GraphWriter.times, node.args[0], 2.0)

    Args:
        graph_module: gets the constants.
        constants: of the graph module, if it has got some already.
        graph: that is written; by default the module's. It is written where its insertion point is, but for
            what takes a node's place.
        ones: inputs f32 [1, length, 1] of ones, by length: what so many numbers are added up with.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        constants: GraphConstants | None = None,
        graph: Graph | None = None,
        ones: Mapping[int, Node] = MappingProxyType({}),
    ) -> None:
        self.graph_module = graph_module
        self.graph = graph_module.graph if graph is None else graph
        self._constants = constants or GraphConstants(graph_module)
        self._ones = ones
        self._shapes = OperatorShapes()
        self._before: Node | None = None

    def replace(self, node: Node, write: Rule, *arguments: Any, **named: Any) -> None:
        """Put what `write(writer, ...)` returns in the place of a node; None keeps the node."""
        outer, self._before = self._before, node
        new = write(self, *arguments, **named)
        self._before = outer
        if new is not None:
            node.replace_all_uses_with(new)
            self.graph.erase_node(node)

    def call(self, target: Any, *arguments: Any, **named: Any) -> Node:
        """One operator."""
        with self._in_place():
            node = self.graph.call_function(target, arguments, named)
        given = torch.fx.node.map_arg((arguments, named), lambda source: to_meta(source.meta["val"]))
        node.meta["val"] = self._shapes.of(target, *given)
        return node

    def constant(self, tensor: torch.Tensor) -> Node:
        """A constant of the program."""
        return self.attribute(self._constants.name(tensor), tensor)

    def attribute(self, name: str, tensor: torch.Tensor) -> Node:
        """A tensor of the module by its name."""
        with self._in_place():
            node = self.graph.get_attr(name)
        node.meta["val"] = to_meta(tensor)
        return node

    def _in_place(self) -> Any:
        return nullcontext() if self._before is None else self.graph.inserting_before(self._before)

    def reshape(self, source: Node, shape: Sequence[int]) -> Node:
        """The same numbers in another shape."""
        return self.call(aten.reshape.default, source, list(shape))

    def total(self, source: Node) -> Node:
        """Sum over the last dimension, kept as 1.

        XNNPACK has no such sum: products with ones stay in its delegate.
        """
        value = source.meta["val"]
        *lead, width = value.shape
        if width == 1:
            return source
        if width in self._ones:
            rows = self.reshape(source, [1, prod(lead), width])
            return self.reshape(self.call(aten.bmm.default, rows, self._ones[width]), [*lead, 1])
        part = part_of_sum(width)
        if part < width:
            parts = self.total(self.reshape(source, [*lead, width // part, part]))
            return self.total(self.reshape(parts, [*lead, width // part]))
        return self.call(aten.linear.default, source, self.constant(torch.ones(1, width, dtype=value.dtype)))


def part_of_sum(count: int) -> int:
    """How many of so many numbers to add up first; all if there are few.

    XNNPACK adds up by a layer of ones. It pads a layer's outputs to as many as a vector holds, and would read
    megabytes of weights for one of a vocabulary.
    """
    if count <= _LONGEST_SUM:
        return count
    part = max(size for size in range(1, _LONGEST_SUM + 1) if count % size == 0)
    return part if part >= _SHORTEST_SUM else count


def apply_rules(
    graph_module: GraphModule,
    rules: Mapping[str, Rule],
    constants: GraphConstants | None = None,
    ones: Mapping[int, Node] = MappingProxyType({}),
) -> None:
    """Rewrite a graph in place; its nodes carry `meta["val"]`.

    Args:
        graph_module: whose graph is rewritten.
        rules: by an operator's name. A rule gets a writer, the node, and the operator's arguments, and
            returns what takes the node's place; None keeps it.
        constants, ones: as of `GraphWriter`.
    """
    writer = GraphWriter(graph_module, constants, ones=ones)
    for node in list(graph_module.graph.nodes):
        rule = rules.get(str(node.target)) if node.op == "call_function" else None
        if rule is not None:
            writer.replace(node, rule, node, *node.args, **node.kwargs)
    graph_module.graph.eliminate_dead_code()
