"""A P-RGE program's graph, rewritten to take every example's row once instead of once per copy.

What doesn't depend on `lora_b` is the same in every copy. It is computed on `batch_size` rows, and repeated
where it meets what differs between copies. Rows are slot-major, so that a value of all copies is that of a
single one, repeated along the first dimension; an operator for which that doesn't hold, such as the
numbering of rows, stays on all rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from server_export.graph.modules import as_module
from server_export.graph.shapes import Shapes

aten = torch.ops.aten

# Their second argument is a shape, whose first number counts rows.
_SHAPED = {aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.expand.default}


def share_rows(graph_module: GraphModule, per_copy: Collection[str], copies: int) -> GraphModule:
    """The same function of fewer rows.

    Args:
        graph_module: a rewritten graph; its nodes carry `meta["val"]`. Its constants are shared.
        per_copy: placeholders that differ between copies; of all others [copies x n, ...] the new graph takes
            [n, ...].
        copies: how many.

    Returns:
        A module that returns what depends on `per_copy` for all copies, and anything else once.
    """
    return _Sharing(graph_module, per_copy, copies).build()


class _Sharing:
    def __init__(self, graph_module: GraphModule, per_copy: Collection[str], copies: int) -> None:
        self.graph_module = graph_module
        self.per_copy = per_copy
        self.copies = copies
        self.graph = Graph()
        self.values: dict[Node, Node] = {}
        # What a node that is computed once gives: tensors without memory.
        self.once: dict[Node, Any] = {}
        self.constant: set[Node] = set()
        self.repeats: dict[Node, Node] = {}
        self.shapes = Shapes()

    def build(self) -> GraphModule:
        """Copy the graph node by node."""
        for node in self.graph_module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.graph.placeholder(str(node.target))
                if node.target in self.per_copy:
                    self.values[node].meta["val"] = node.meta["val"]
                else:
                    self._know(node, _fewer(node.meta["val"], self.copies))
            elif node.op == "output":
                self.values[node] = self.graph.node_copy(node, self.values.__getitem__)
            elif node.op == "get_attr" or self.constant.issuperset(node.all_input_nodes):
                self.values[node] = self.graph.node_copy(node, self.values.__getitem__)
                self.constant.add(node)
            elif not self._computed_once(node):
                self.values[node] = self.graph.node_copy(node, self._for_all_copies)
        self.graph.eliminate_dead_code()
        return as_module(self.graph_module, self.graph)

    def _computed_once(self, node: Node) -> bool:
        """Add a node for one copy's rows, if that is all it needs."""
        if any(source not in self.once and source not in self.constant for source in node.all_input_nodes):
            return False
        shape = list(node.args[1]) if node.target in _SHAPED else []
        if shape and isinstance(shape[0], int) and shape[0] > 0:
            if shape[0] % self.copies:
                return False
            shape[0] //= self.copies
        arguments = (node.args[0], shape, *node.args[2:]) if shape else node.args
        inputs = torch.fx.node.map_arg((arguments, node.kwargs), self._value)
        try:
            found = self.shapes.of(node.target, *inputs)
            expected = _fewer(node.meta["val"], self.copies)
        except Exception:
            return False
        if _shapes(found) != _shapes(expected):
            return False
        copied = torch.fx.node.map_arg((arguments, node.kwargs), self.values.__getitem__)
        self.values[node] = self.graph.call_function(node.target, *copied)
        self._know(node, expected)
        return True

    def _know(self, node: Node, value: Any) -> None:
        self.once[node] = value
        self.values[node].meta["val"] = value

    def _value(self, node: Node) -> Any:
        return self.once[node] if node in self.once else _empty(node.meta["val"])

    def _for_all_copies(self, node: Node) -> Node:
        """The value of a node for the rows of all copies."""
        if node not in self.once or isinstance(self.once[node], tuple):
            return self.values[node]
        if node not in self.repeats:
            self.repeats[node] = self._repeated(self.values[node], self.once[node], node.meta["val"])
        return self.repeats[node]

    def _repeated(self, source: Node, value: torch.Tensor, whole: Any) -> Node:
        shape, result = list(value.shape), list(whole.shape)
        split = self.graph.call_function(aten.reshape.default, (source, [1, *shape]))
        if value.dtype.is_floating_point:
            # A product with ones stays in the delegate.
            repeated = self.graph.call_function(aten.mul.Tensor, (split, self._ones(len(shape))))
        else:
            repeated = self.graph.call_function(aten.expand.default, (split, [self.copies, *shape]))
        node = self.graph.call_function(aten.reshape.default, (repeated, result))
        node.meta["val"] = whole
        return node

    def _ones(self, rank: int) -> Node:
        name = f"copies_{rank}"
        if not hasattr(self.graph_module, name):
            self.graph_module.register_buffer(name, torch.ones(self.copies, *[1] * rank))
        return self.graph.get_attr(name)


def _fewer(value: Any, copies: int) -> Any:
    """Tensors without memory of a copy's share of the rows; ValueError where there is no such share."""
    if isinstance(value, tuple | list):
        return tuple(_fewer(part, copies) for part in value)
    if value.dim() == 0 or value.shape[0] % copies:
        raise ValueError(f"{tuple(value.shape)} has no rows of {copies} copies")
    return torch.empty((value.shape[0] // copies, *value.shape[1:]), dtype=value.dtype, device="meta")


def _empty(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_empty, value))
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _shapes(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_shapes(part) for part in value]
    return (tuple(value.shape), value.dtype)
