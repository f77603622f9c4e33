"""The part of a graph that depends only on the length of a row, and its values."""

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

# Operators that only change the layout.
_LAYOUTS = members(
    *(Category.IDENTITY, Category.CAST, Category.CAST_LIKE, Category.SPLIT, Category.RESHAPE),
    *(Category.SQUEEZE, Category.PERMUTE, Category.EXPAND, Category.EXPAND_LIKE),
)
# The most positions that a table may have before those of a row.
_MAX_EXTRA = 8


class Positions:
    """The nodes of a graph that depend only on the length of a row, and their values.

    Args:
        graph_module: the traced graph, with `TABLE` nodes.
        tables: the tables of the model.
        buffers: values of tensors that no checkpoint file has, by their names in the graph.
    """

    def __init__(
        self, graph_module: GraphModule, tables: ModelTables, buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._graph_module, self.tables = graph_module, tables
        self.longest = tables.longest
        self._buffers = buffers
        self._known: dict[tuple[Node, int], Any] = {}
        # Whether a node depends on anything but tables.
        self.is_computed: dict[Node, bool] = {}
        for node in graph_module.graph.nodes:
            sources = node.all_input_nodes
            if node.op == "get_attr" and self._constant(str(node.target)) is not None:
                self.is_computed[node] = True
            elif node.target is TABLE:
                self.is_computed[node] = False
            elif (
                node.op == "call_function" and self.is_computed.keys() >= set(sources) and _is_evaluable(node)
            ):
                computed = not sources or any(map(self.is_computed.__getitem__, sources))
                self.is_computed[node] = computed or _repeats(node)

    @cached_property
    def ends(self) -> list[Node]:
        """The computed nodes that are read by nodes which depend on more than positions.

        The list is computed once. A pass that rewrites the readers of a node removes this node from the list.
        """
        ends: dict[Node, None] = {}
        for node, has_values in self.is_computed.items():
            if has_values and any(user not in self.is_computed for user in node.users):
                while node.target in _LAYOUTS and any(map(self.is_computed.get, node.all_input_nodes)):
                    if _repeats(node):
                        break
                    (node, *_) = node.all_input_nodes
                if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor):
                    ends[node] = None
        for node in ends:
            # Evaluate all nodes before any of them is replaced, because some depend on others.
            self.of(node, self.longest)
        return list(ends)

    def known(self, node: Any) -> torch.Tensor | None:
        """Return a node's value for the longest row, or None if the node depends on more than positions."""
        value = self.of(node, self.longest) if node in self.is_computed else None
        return value if isinstance(value, torch.Tensor) else None

    def of(self, node: Node, length: int) -> Any:
        """Return a node's value for a row of `length` tokens."""
        if (node, length) not in self._known:
            self._known[node, length] = self._compute(node, length)
        return self._known[node, length]

    def _compute(self, node: Node, length: int) -> Any:
        if node.op == "get_attr":
            return self._constant(str(node.target))
        if node.target is TABLE:
            return self.tables.all[node.args[0]].of(length)
        is_arange = str(node.target).startswith("aten.arange")
        # A size in a change of layout may be a width, unless it is only slightly larger than the marker.
        extra = TOKENS if is_arange else _MAX_EXTRA if node.target in _LAYOUTS else 0

        def sized(value: Any) -> Any:
            if type(value) is int and TOKENS < value < TOKENS + extra:
                return value - TOKENS + length
            if is_arange and type(value) is int and -TOKENS < value < -TOKENS // 2:
                return value + TOKENS - length
            for marker, size in ((COPIES, 1), (BATCH, 1), (TOKENS, length)):
                value = resized(value, marker, size)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        sized_arguments = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda source: self.of(source, length)
        )
        arguments, named = map_aggregate(sized_arguments, sized)
        with torch.no_grad():
            value = node.target(*arguments, **named)
            # torch.empty has no defined values; they are overwritten before anything reads them.
            return value.zero_() if "empty" in str(node.target) else value

    def _constant(self, name: str) -> torch.Tensor | None:
        tensor = get_attribute(self._graph_module, name)
        if name in self._buffers:
            return self._buffers[name]
        is_known = isinstance(tensor, torch.Tensor) and not tensor.is_meta
        return tensor if is_known and not isinstance(tensor, torch.nn.Parameter) else None


def _repeats(node: Node) -> bool:
    """Return whether a node repeats elements of each position, as rotations of neighbouring pairs do."""
    if node.target is not aten.expand.default or not node.meta["val"].dtype.is_floating_point:
        return False
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
    return len(before) == len(after) and before[1:] != after[1:]


def _is_evaluable(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return "getitem" in str(node.target)
    return node.target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in node.target.tags
