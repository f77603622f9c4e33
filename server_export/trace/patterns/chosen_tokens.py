"""Attention to the tokens with the largest scores; rows must be short enough that all are selected."""

from __future__ import annotations

import operator
from typing import Any

import torch

from prge.errors import Refusal
from server_export.ir.markers import TOKENS
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns import Pattern, Rewrite, register

aten = torch.ops.aten


def select_all(graph: ModelGraph) -> None:
    """Replace marks of selected tokens by a constant, in place, because all tokens of a row are selected.

    Raises:
        Refusal: a row may have more tokens.
    """
    graph_module, longest = graph.graph_module, graph.tables.longest
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.scatter.value):
        marked, dim, selected, number = node.args
        topk: Any = selected.args[0] if selected.target is operator.getitem else selected
        if topk.target is not aten.topk.default or marked.meta["val"].shape[dim] != TOKENS:
            continue
        if topk.args[1] < longest:
            raise Refusal(
                "token-budget",
                f"The model attends to {topk.args[1]} tokens of a row, but rows may have {longest} tokens.",
                operator=str(topk.target),
                remedy=f"Use --sequence-length and --context of at most {topk.args[1]}.",
            )
        with graph_module.graph.inserting_before(node):
            new = graph_module.graph.call_function(
                aten.full.default, ([*node.meta["val"].shape], number), {"dtype": node.meta["val"].dtype}
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)


register(
    Pattern(
        "chosen tokens",
        serves="attention to the tokens with the largest scores, such as Doge's",
        model_types=("doge",),
        example="doge",
        rewrites=(Rewrite(select_all, operators=(aten.scatter.value,)),),
    )
)
