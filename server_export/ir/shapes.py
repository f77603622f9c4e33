"""Shapes, dtypes and strides of the results of operators, computed on the meta device."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from server_export.ir.modules import get_attribute, make_graph_module


class OperatorShapes:
    """Caches the results of operators on meta tensors.

    Layers repeat, and PyTorch computes many shapes in Python, so every distinct call is evaluated once.
    Callers share the resulting tensors and must not modify them.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, target: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return the result of an operator on meta tensors, lists of them, and other values."""
        key = (target, _key(arguments), _key(named))
        if key not in self._known:
            self._known[key] = to_meta(target(*arguments, **named))
        return self._known[key]


def to_meta(value: Any) -> Any:
    """Return meta tensors for a tensor, or for a tuple or list of tensors."""
    if isinstance(value, tuple | list):
        return tuple(map(to_meta, value))
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    if isinstance(value, Mapping):
        return tuple((name, _key(each)) for name, each in value.items())
    # 1, 1.0 and True compare equal, but operators treat them differently.
    return type(value), value


def fill_in_values(graph_module: GraphModule) -> None:
    """Compute `meta["val"]`, a meta tensor, for the nodes of a graph that lack it."""
    shapes = OperatorShapes()
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = to_meta(get_attribute(graph_module, str(node.target)))
        if node.op == "call_function" and "val" not in node.meta:
            arguments, named = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda source: to_meta(source.meta["val"])
            )
            node.meta["val"] = shapes.of(node.target, arguments, named)


def resized(value: Any, marker: int, size: int) -> Any:
    """Replace every factor `marker` of an integer by `size`; other values are returned unchanged."""
    if type(value) is int and 0 < value < sys.maxsize and value % marker == 0:
        return resized(value // marker, marker, size) * size
    return value


def with_size(graph_module: GraphModule, marker: int, size: int) -> GraphModule:
    """Return the graph for another size; every number that depends on the size is a multiple of the marker.

    Args:
        graph_module: the graph, which is not modified; its placeholders have `meta["val"]`. The constants are
            shared.
        marker: a large prime, the present size of the graph.
        size: the size that replaces the marker.
    """

    def with_new_size(value: Any) -> Any:
        return resized(value, marker, size)

    graph, copies = Graph(), dict[Node, Node]()
    for node in graph_module.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder":
            value = node.meta["val"]
            shape = [with_new_size(number) for number in value.shape]
            copy.meta["val"] = torch.empty(shape, dtype=value.dtype, device="meta")
        elif node.op == "call_function":
            copy.args, copy.kwargs = map_aggregate((copy.args, copy.kwargs), with_new_size)
            del copy.meta["val"]
    result = make_graph_module(graph_module, graph)
    fill_in_values(result)
    return result
