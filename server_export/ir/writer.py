"""Write operators into an fx graph, and apply rewrite rules to its nodes."""

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

# The most elements that one sum adds, and the fewest that are worth a separate sum.
_LONGEST_SUM = 1024
_SHORTEST_SUM = 32

Rule = Callable[..., Node | None]


class Calls:
    """Short names for operators, so that one formula can be written into a graph or computed eagerly."""

    def call(self, target: Any, *arguments: Any, **named: Any) -> Any:
        """Write or compute one operator."""
        raise NotImplementedError

    def times(self, left: Any, right: Any) -> Any:
        """Return left * right."""
        return self.call(aten.mul.Tensor, left, right)

    def plus(self, left: Any, right: Any) -> Any:
        """Return left + right."""
        return self.call(aten.add.Tensor, left, right)

    def minus(self, left: Any, right: Any) -> Any:
        """Return left - right."""
        return self.call(aten.sub.Tensor, left, right)

    def negative(self, x: Any) -> Any:
        """Return -x."""
        return self.call(aten.neg.default, x)

    def reciprocal(self, x: Any) -> Any:
        """Return 1 / x."""
        return self.call(aten.reciprocal.default, x)

    def exp(self, x: Any) -> Any:
        """Return exp(x)."""
        return self.call(aten.exp.default, x)

    def sigmoid(self, x: Any) -> Any:
        """Return 1 / (1 + exp(-x))."""
        return self.call(aten.sigmoid.default, x)


class Eager(Calls):
    """Computes operators on tensors."""

    def call(self, target: Any, *arguments: Any, **named: Any) -> Any:
        """See `Calls`."""
        return target(*arguments, **named)


class GraphWriter(Calls):
    """Writes operators into a graph and sets `meta["val"]` of every new node.

        writer = GraphWriter(graph_module)
        writer.replace(node, GraphWriter.times, node.args[0], 2.0)

    Args:
        graph_module: the module that stores the constants.
        constants: constants that the graph module already has.
        graph: the graph to write to, by default the module's. Nodes are written at its insertion point,
            except within `replace`.
        ones: inputs f32 [1, length, 1] of ones, by length. Dimensions of these lengths are summed by a
            product with them.
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
        """Replace a node by the result of `write(writer, ...)`; None keeps the node."""
        previous, self._before = self._before, node
        new = write(self, *arguments, **named)
        self._before = previous
        if new is not None:
            node.replace_all_uses_with(new)
            self.graph.erase_node(node)

    def call(self, target: Any, *arguments: Any, **named: Any) -> Node:
        """Write one operator."""
        with self._at_insertion_point():
            node = self.graph.call_function(target, arguments, named)
        values = torch.fx.node.map_arg((arguments, named), lambda source: to_meta(source.meta["val"]))
        node.meta["val"] = self._shapes.of(target, *values)
        return node

    def constant(self, tensor: torch.Tensor) -> Node:
        """Write a read of a tensor that is stored as a constant of the module."""
        return self.attribute(self._constants.name(tensor), tensor)

    def attribute(self, name: str, tensor: torch.Tensor) -> Node:
        """Write a read of a tensor of the module by its name."""
        with self._at_insertion_point():
            node = self.graph.get_attr(name)
        node.meta["val"] = to_meta(tensor)
        return node

    def _at_insertion_point(self) -> Any:
        return nullcontext() if self._before is None else self.graph.inserting_before(self._before)

    def reshape(self, source: Node, shape: Sequence[int]) -> Node:
        """Write a reshape."""
        return self.call(aten.reshape.default, source, list(shape))

    def total(self, source: Node) -> Node:
        """Write the sum over the last dimension, which is kept with size 1.

        XNNPACK has no such sum, so it is written as products with ones, which stay in the delegate.
        """
        value = source.meta["val"]
        *lead, width = value.shape
        if width == 1:
            return source
        if width in self._ones:
            rows = self.reshape(source, [1, prod(lead), width])
            return self.reshape(self.call(aten.bmm.default, rows, self._ones[width]), [*lead, 1])
        chunk = part_of_sum(width)
        if chunk < width:
            partial_sums = self.total(self.reshape(source, [*lead, width // chunk, chunk]))
            return self.total(self.reshape(partial_sums, [*lead, width // chunk]))
        return self.call(aten.linear.default, source, self.constant(torch.ones(1, width, dtype=value.dtype)))


def part_of_sum(count: int) -> int:
    """Return how many of `count` elements to add in one step; `count` if one step adds all of them.

    XNNPACK sums by a linear layer of ones and pads the outputs of a layer to the width of a vector register,
    so one sum over a whole vocabulary would read megabytes of weights.
    """
    if count <= _LONGEST_SUM:
        return count
    chunk = max(size for size in range(1, _LONGEST_SUM + 1) if count % size == 0)
    return chunk if chunk >= _SHORTEST_SUM else count


def apply_rules(
    graph_module: GraphModule,
    rules: Mapping[str, Rule],
    constants: GraphConstants | None = None,
    ones: Mapping[int, Node] = MappingProxyType({}),
) -> None:
    """Rewrite a graph in place; its nodes have `meta["val"]`.

    Args:
        graph_module: the module whose graph is rewritten.
        rules: rules by operator name. A rule gets a writer, the node and the operator's arguments, and
            returns the replacement of the node; None keeps the node.
        constants: see `GraphWriter`.
        ones: see `GraphWriter`.
    """
    writer = GraphWriter(graph_module, constants, ones=ones)
    for node in list(graph_module.graph.nodes):
        rule = rules.get(str(node.target)) if node.op == "call_function" else None
        if rule is not None:
            writer.replace(node, rule, node, *node.args, **node.kwargs)
    graph_module.graph.eliminate_dead_code()
