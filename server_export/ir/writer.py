"""Writing operators into a graph, and rules by which they take the place of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from server_export.ir.constants import Constants
from server_export.ir.shapes import Shapes, without_memory

aten = torch.ops.aten

# Numbers that are added up in one step, and those that are worth one of their own.
_LONGEST_SUM = 1024
_SHORTEST_SUM = 32

Rule = Callable[..., Node | None]
F = TypeVar("F", bound=Callable[..., Any])


def registrar(rules: dict[str, F]) -> Callable[..., Callable[[F], F]]:
    """A decorator that notes rules by the names of their operators, some of which a library brings later.

    rule = registrar(RULES)

    @rule(aten.pow.Tensor_Scalar)
    def _power(writer, node, source, exponent): ...
    """

    def rule(*targets: Any) -> Callable[[F], F]:
        def register(function: F) -> F:
            rules.update(dict.fromkeys(map(str, targets), function))
            return function

        return register

    return rule


class Writer:
    """Writes operators in front of the node that they replace; every new one gets its `meta["val"]`.

    writer = Writer(graph_module)
    writer.replace(node, Writer.times, node.args[0], 2.0)
    """

    def __init__(self, graph_module: GraphModule, constants: Constants | None = None) -> None:
        self.graph_module = graph_module
        self._constants = constants or Constants(graph_module)
        self._shapes = Shapes()
        self._before: Node | None = None

    def replace(self, node: Node, write: Rule, *arguments: Any, **named: Any) -> None:
        """Put what `write(writer, ...)` returns in the place of a node; None keeps the node."""
        self._before = node
        new = write(self, *arguments, **named)
        if new is not None:
            node.replace_all_uses_with(new)
            self.graph_module.graph.erase_node(node)

    def call(self, target: Any, *arguments: Any) -> Node:
        """One operator."""
        with self.graph_module.graph.inserting_before(self._before):
            node = self.graph_module.graph.call_function(target, arguments)
        values = torch.fx.node.map_arg(arguments, lambda source: without_memory(source.meta["val"]))
        node.meta["val"] = self._shapes.of(target, values, {})
        return node

    def constant(self, tensor: torch.Tensor) -> Node:
        """A constant of the program."""
        assert self._before is not None
        return self._constants.node(tensor, self._before)

    def times(self, left: Node, right: Node | float) -> Node:
        """A product."""
        return self.call(aten.mul.Tensor, left, right)

    def plus(self, left: Node, right: Node | float) -> Node:
        """A sum."""
        return self.call(aten.add.Tensor, left, right)

    def minus(self, left: Node, right: Node) -> Node:
        """A difference."""
        return self.call(aten.sub.Tensor, left, right)

    def reshape(self, source: Node, shape: Sequence[int]) -> Node:
        """The same numbers in another shape."""
        return self.call(aten.reshape.default, source, list(shape))

    def total(self, source: Node) -> Node:
        """Sum over the last dimension, kept as 1: layers of ones stay in the delegate."""
        *lead, width = source.meta["val"].shape
        part = part_of_sum(width)
        if part < width:
            parts = self.total(self.reshape(source, [*lead, width // part, part]))
            return self.total(self.reshape(parts, [*lead, width // part]))
        return self.call(aten.linear.default, source, self.constant(torch.ones(1, width)))


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
    graph_module: GraphModule, rules: Mapping[str, Rule], constants: Constants | None = None
) -> None:
    """Rewrite a graph in place; its nodes carry `meta["val"]`.

    Args:
        graph_module: whose graph is rewritten.
        rules: by an operator's name. A rule gets a writer, the node, and the operator's arguments, and
            returns what takes the node's place; None keeps it.
        constants: of the graph module, if it has got some already.
    """
    writer = Writer(graph_module, constants)
    for node in list(graph_module.graph.nodes):
        rule = rules.get(str(node.target)) if node.op == "call_function" else None
        if rule is not None:
            writer.replace(node, rule, node, *node.args, **node.kwargs)
    graph_module.graph.eliminate_dead_code()
