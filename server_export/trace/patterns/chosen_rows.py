"""Layers that apply to some rows only, such as those of one language; here to all rows or to none."""

from __future__ import annotations

import torch

from server_export.ir.shapes import fill_in_values
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns import Pattern, Rewrite, register

aten = torch.ops.aten
_CHOOSING = (aten.masked_fill.Scalar, aten.index_put.default, aten.index.Tensor)


def choose_rows(graph_of_model: ModelGraph) -> None:
    """Remove selections that select all rows or none, in place."""
    graph_module, positions = graph_of_model.graph_module, graph_of_model.positions
    graph = graph_module.graph
    changed = False
    for node in [*graph.nodes]:
        if node.target is aten.masked_fill.Scalar and positions.is_computed.get(node.args[1]):
            if not bool(positions.of(node.args[1], positions.longest).any()):
                node.replace_all_uses_with(node.args[0])
            continue
        is_put = node.target is aten.index_put.default
        if not is_put and node.target is not aten.index.Tensor:
            continue
        source, (mask, *others), *values = node.args
        if others or not positions.is_computed.get(mask) or mask.meta["val"].dtype is not torch.bool:
            continue
        mask_values = positions.of(mask, positions.longest)
        if bool(mask_values.all()) or (is_put and not bool(mask_values.any())):
            node.replace_all_uses_with(values[0] if is_put and bool(mask_values.all()) else source)
            changed = True
    if changed:
        for node in graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
            graph.erase_node(node)
        graph.eliminate_dead_code()
        for node in graph.nodes:
            # The number of selected rows was symbolic.
            if any(type(size) is not int for size in getattr(node.meta.get("val"), "shape", ())):
                del node.meta["val"]
        fill_in_values(graph_module)


register(
    Pattern(
        "chosen rows",
        serves="layers that apply to some rows only, such as those of one language in X-MOD",
        model_types=("xmod",),
        example="xmod",
        rewrites=(Rewrite(choose_rows, "positions", operators=_CHOOSING),),
    )
)
