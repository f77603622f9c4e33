"""Layers for some rows alone, such as those of one language: all rows are chosen, or none."""

from __future__ import annotations

import torch

from server_export.ir.shapes import fill_in_values
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns import Pattern, Rewrite, register

aten = torch.ops.aten
_CHOOSING = (aten.masked_fill.Scalar, aten.index_put.default, aten.index.Tensor)


def choose_rows(graph_of_model: ModelGraph) -> None:
    """Write what chooses all rows, or none, without a choice, in place."""
    graph_module, positions = graph_of_model.graph_module, graph_of_model.positions
    graph = graph_module.graph
    changed = False
    for node in [*graph.nodes]:
        if node.target is aten.masked_fill.Scalar and positions.is_made.get(node.args[1]):
            if not bool(positions.of(node.args[1], positions.longest).any()):
                node.replace_all_uses_with(node.args[0])
            continue
        is_put = node.target is aten.index_put.default
        if not is_put and node.target is not aten.index.Tensor:
            continue
        source, (mask, *others), *values = node.args
        if others or not positions.is_made.get(mask) or mask.meta["val"].dtype is not torch.bool:
            continue
        chosen = positions.of(mask, positions.longest)
        if bool(chosen.all()) or (is_put and not bool(chosen.any())):
            node.replace_all_uses_with(values[0] if is_put and bool(chosen.all()) else source)
            changed = True
    if changed:
        for node in graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
            graph.erase_node(node)
        graph.eliminate_dead_code()
        for node in graph.nodes:
            # How many rows are chosen wasn't known.
            if any(type(size) is not int for size in getattr(node.meta.get("val"), "shape", ())):
                del node.meta["val"]
        fill_in_values(graph_module)


register(
    Pattern(
        "chosen rows",
        serves="layers for some rows alone, such as those of one language in X-MOD",
        model_types=("xmod",),
        example="xmod",
        rewrites=(Rewrite(choose_rows, "positions", operators=_CHOOSING),),
    )
)
