"""One trace for programs of the same model that differ in their number of rows alone.

A model is traced with a number of rows that nothing else in a graph is a multiple of. Wherever it shows in a
shape, another number can take its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from server_export.graph.modules import as_module, attribute
from server_export.graph.shapes import Shapes

# A prime that no model's width, length or vocabulary is known to have as a factor.
TRACED_ROWS = 7919


def with_rows(graph_module: GraphModule, rows: int) -> GraphModule | None:
    """A graph of `rows` rows from one that was traced with `TRACED_ROWS`.

    Args:
        graph_module: a rewritten graph of one copy, whose rows don't depend on each other; its nodes carry
            `meta["val"]`. Its constants are shared, but for those that have a part for every row.
        rows: at most `TRACED_ROWS`.

    Returns:
        A module whose nodes carry their values without memory, or None if the graph's shapes don't follow its
        rows: it has to be traced with them.
    """
    graph, copies, parts = Graph(), dict[Node, Node](), dict[str, torch.Tensor]()
    shapes = Shapes()

    def fewer(number: Any) -> Any:
        is_multiple = type(number) is int and number and number % TRACED_ROWS == 0
        return number // TRACED_ROWS * rows if is_multiple else number

    for node in graph_module.graph.nodes:
        copies[node] = copy = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder":
            known = node.meta["val"]
            shape = map_aggregate(tuple(known.shape), fewer)
            copy.meta["val"] = torch.empty(shape, dtype=known.dtype, device="meta")
        elif node.op == "get_attr":
            tensor = attribute(graph_module, str(node.target))
            if TRACED_ROWS in tensor.shape:
                # The first rows are the same whatever comes after them.
                tensor = tensor.narrow(tensor.shape.index(TRACED_ROWS), 0, rows).clone()
                parts[str(node.target)] = tensor
            copy.meta["val"] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        elif node.op == "call_function":
            copy.args, copy.kwargs = map_aggregate((copy.args, copy.kwargs), fewer)
            arguments, named = map_arg((copy.args, copy.kwargs), lambda source: source.meta["val"])
            try:
                copy.meta["val"] = shapes.of(node.target, arguments, named)
            except RuntimeError:
                return None
    result = as_module(graph_module, graph)
    for name, tensor in parts.items():
        setattr(result, name, tensor)
    return result
