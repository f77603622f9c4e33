"""What operators answer, by shape, type and strides alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from server_export.ir.modules import get_attribute, make_graph_module


class OperatorShapes:
    """Results of operators on tensors without memory, on the `meta` device.

    Layers repeat, and much of PyTorch finds out a shape in Python: equal calls are made once. Calls get the
    same tensors as results, which are to be read only.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, target: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """The result of an operator on tensors without memory, lists of them, and other values."""
        key = (target, _key(arguments), _key(named))
        if key not in self._known:
            self._known[key] = to_meta(target(*arguments, **named))
        return self._known[key]


def to_meta(value: Any) -> Any:
    """Tensors without memory for a tensor, or for a tuple or list of them."""
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
    # 1, 1.0 and True are equal, but what an operator makes of them isn't.
    return type(value), value


def fill_in_values(graph_module: GraphModule) -> None:
    """Give the nodes of a graph that have none a `meta["val"]`: a tensor without memory."""
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
    """A number of a graph, with `size` in the place of every `marker` in it; anything else as it is."""
    if type(value) is int and 0 < value < sys.maxsize and value % marker == 0:
        return resized(value // marker, marker, size) * size
    return value


def with_size(graph_module: GraphModule, marker: int, size: int) -> GraphModule:
    """The same graph of another size, where every number that is made of a size is a multiple of it.

    Args:
        graph_module: its placeholders carry `meta["val"]`. Not changed; the constants are shared.
        marker: a large prime, which is the graph's size.
        size: what takes its place.
    """

    def changed(value: Any) -> Any:
        return resized(value, marker, size)

    graph, copies = Graph(), dict[Node, Node]()
    for node in graph_module.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder":
            value = node.meta["val"]
            shape = [changed(number) for number in value.shape]
            copy.meta["val"] = torch.empty(shape, dtype=value.dtype, device="meta")
        elif node.op == "call_function":
            copy.args, copy.kwargs = map_aggregate((copy.args, copy.kwargs), changed)
            del copy.meta["val"]
    result = make_graph_module(graph_module, graph)
    fill_in_values(result)
    return result
