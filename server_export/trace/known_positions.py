"""What of a graph depends on the length of a row and on nothing else, with its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from server_export.ir.markers import BATCH, COPIES, TOKENS
from server_export.ir.modules import get_attribute
from server_export.ir.operators import Category, members
from server_export.ir.shapes import resized
from server_export.trace.tables import TABLE, ModelTables

aten = torch.ops.aten

# What only lays numbers out in another way.
_LAYOUTS = members(
    *(Category.IDENTITY, Category.CAST, Category.CAST_LIKE, Category.SPLIT, Category.RESHAPE),
    *(Category.SQUEEZE, Category.PERMUTE, Category.EXPAND, Category.EXPAND_LIKE),
)
# Positions that a table may have before those of a row.
_MOST_MORE = 8


class Positions:
    """The nodes of a graph that depend on the length of a row alone, and their values.

    Args:
        graph_module: as it was traced, with `TABLE` nodes.
        tables: of the model.
        buffers: values of tensors that no file has, by their names in the graph.
    """

    def __init__(
        self, graph_module: GraphModule, tables: ModelTables, buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._graph_module, self.tables = graph_module, tables
        self.longest = tables.longest
        self._buffers = buffers
        self._known: dict[tuple[Node, int], Any] = {}
        # Whether it is made of more than tables.
        self.is_made: dict[Node, bool] = {}
        for node in graph_module.graph.nodes:
            sources = node.all_input_nodes
            if node.op == "get_attr" and self._constant(str(node.target)) is not None:
                self.is_made[node] = True
            elif node.target is TABLE:
                self.is_made[node] = False
            elif node.op == "call_function" and self.is_made.keys() >= set(sources) and _is_computed(node):
                made = not sources or any(map(self.is_made.__getitem__, sources))
                self.is_made[node] = made or _repeats(node)

    @cached_property
    def ends(self) -> list[Node]:
        """What was computed and is read by what depends on more.

        It is found once: a pass that has written what reads one of them takes that one out.
        """
        found: dict[Node, None] = {}
        for node, is_made in self.is_made.items():
            if is_made and any(user not in self.is_made for user in node.users):
                while node.target in _LAYOUTS and any(map(self.is_made.get, node.all_input_nodes)):
                    if _repeats(node):
                        break
                    (node, *_) = node.all_input_nodes
                if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor):
                    found[node] = None
        for node in found:
            # Before any is replaced: some are made of others.
            self.of(node, self.longest)
        return list(found)

    def known(self, value: Any) -> torch.Tensor | None:
        """A node's numbers in the longest row, if it depends on positions alone."""
        found = self.of(value, self.longest) if value in self.is_made else None
        return found if isinstance(found, torch.Tensor) else None

    def of(self, node: Node, length: int) -> Any:
        """A node's value in a row of so many tokens."""
        if (node, length) not in self._known:
            self._known[node, length] = self._computed(node, length)
        return self._known[node, length]

    def _computed(self, node: Node, length: int) -> Any:
        if node.op == "get_attr":
            return self._constant(str(node.target))
        if node.target is TABLE:
            return self.tables.all[node.args[0]].of(length)
        of_arange = str(node.target).startswith("aten.arange")
        # Of what is laid out such a number may be a width, if it isn't just larger.
        more = TOKENS if of_arange else _MOST_MORE if node.target in _LAYOUTS else 0

        def sized(value: Any) -> Any:
            if type(value) is int and TOKENS < value < TOKENS + more:
                return value - TOKENS + length
            if of_arange and type(value) is int and -TOKENS < value < -TOKENS // 2:
                return value + TOKENS - length
            for marker, size in ((COPIES, 1), (BATCH, 1), (TOKENS, length)):
                value = resized(value, marker, size)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        given = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: self.of(source, length))
        arguments, named = map_aggregate(given, sized)
        with torch.no_grad():
            value = node.target(*arguments, **named)
            # What is made without numbers is written over before it is read.
            return value.zero_() if "empty" in str(node.target) else value

    def _constant(self, name: str) -> torch.Tensor | None:
        tensor = get_attribute(self._graph_module, name)
        if name in self._buffers:
            return self._buffers[name]
        is_known = isinstance(tensor, torch.Tensor) and not tensor.is_meta
        return tensor if is_known and not isinstance(tensor, torch.nn.Parameter) else None


def _repeats(node: Node) -> bool:
    """Whether it repeats numbers of each position, as rotations of neighbours do with a table's."""
    if node.target is not aten.expand.default or not node.meta["val"].dtype.is_floating_point:
        return False
    before, behind = node.args[0].meta["val"].shape, node.meta["val"].shape
    return len(before) == len(behind) and before[1:] != behind[1:]


def _is_computed(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return "getitem" in str(node.target)
    return node.target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in node.target.tags
