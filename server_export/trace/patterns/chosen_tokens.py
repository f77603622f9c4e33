"""Attention to the tokens with the largest scores: where a row has no more than those, all are chosen."""

from __future__ import annotations

import operator
from typing import Any

import torch

from prge.errors import Refusal
from server_export.ir.markers import TOKENS
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns import Pattern, Rewrite, register

aten = torch.ops.aten


def choose_all(graph: ModelGraph) -> None:
    """Write marks of tokens that are chosen without a choice, in place: a row has no more than those.

    Raises:
        Refusal: a row may have more.
    """
    graph_module, longest = graph.graph_module, graph.tables.longest
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.scatter.value):
        marked, dim, chosen, number = node.args
        choice: Any = chosen.args[0] if chosen.target is operator.getitem else chosen
        if choice.target is not aten.topk.default or marked.meta["val"].shape[dim] != TOKENS:
            continue
        if choice.args[1] < longest:
            raise Refusal(
                "token-budget",
                f"the model chooses {choice.args[1]} tokens of a row, and rows have up to {longest}",
                operator=str(choice.target),
                remedy=f"--sequence-length and --context of at most {choice.args[1]} leave it no choice",
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
        rewrites=(Rewrite(choose_all, operators=(aten.scatter.value,)),),
    )
)
