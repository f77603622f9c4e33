"""Experts that see all tokens, weighted by shares that are mostly 0: each token is routed to the others only.

An expert becomes a block like those of other mixtures, and the driver distributes the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx import Node

from prge.errors import Refusal
from server_export.checkpoint.experts import expert_layers, is_dense_experts
from server_export.ir.writer import GraphWriter
from server_export.trace.experts import EXPERTS
from server_export.trace.model_graph import ModelGraph, TracedModel
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.patterns.experts import width_of

aten = torch.ops.aten
# Operators that compute each share separately.
_ELEMENTWISE = {aten.sigmoid.default, aten.to.dtype, aten._to_copy.default}


@torch.library.custom_op("prge::all_experts", mutates_args=())
def all_experts(states: torch.Tensor, number: int, out: int) -> torch.Tensor:
    """Return the outputs of a layer's experts for [experts x tokens, in], an equal part for each expert."""
    raise NotImplementedError("Experts are traced and become blocks; the operator is never run.")


@all_experts.register_fake
def _(states: torch.Tensor, number: int, out: int) -> torch.Tensor:
    return states.new_empty((states.shape[0], out))


ALL_EXPERTS = torch.ops.prge.all_experts.default


def _prepare(traced: TracedModel) -> None:
    """Make all experts of a layer one operator of the graph, in place."""
    for number, module in enumerate(expert_layers(traced.model).values()):
        if is_dense_experts(module):
            module.forward = partial(_call_all_experts, module, number)


def _call_all_experts(module: Any, number: int, states: torch.Tensor) -> torch.Tensor:
    """Return the outputs of all experts, as one operator of the graph."""
    output: torch.Tensor = ALL_EXPERTS(states, number, width_of(module))
    return output


def choose_experts(graph: ModelGraph) -> None:
    """Route tokens only to experts whose share isn't 0, in place.

    Raises:
        Refusal: it isn't known which shares are 0.
    """
    graph_module = graph.graph_module
    writer = GraphWriter(graph_module)
    for node in graph_module.graph.find_nodes(op="call_function", target=ALL_EXPERTS):
        product, number, out = node.args
        sums, *others = (user for each in node.users for user in each.users)
        parts = _tokens_and_scores(product)
        selection = _sparse_shares(parts[1]) if parts else None
        is_sum = sums.target is aten.sum.dim_IntList and sums.args[1:] == ([0],) and not others
        if parts is None or selection is None or not is_sum:
            raise Refusal(
                "shares-of-experts",
                "All experts of a layer see all tokens, and prge does not recognize how their shares are "
                "computed.",
                operator=str(ALL_EXPERTS),
                remedy="Use another model type, such as qwen3_moe, olmoe, granitemoe or mixtral.",
            )
        source, (steps, shares, index) = parts[0], selection

        def write(writer: GraphWriter, *arguments: Any) -> Node:
            source, steps, shares, index, number, out = arguments
            for step in steps:
                shares = writer.call(step.target, shares, *step.args[1:])
            index = writer.call(aten.to.dtype, index, torch.float32)
            return writer.call(EXPERTS, source, shares, index, number, out)

        writer.replace(sums, write, source, steps, shares, index, number, out)
    graph_module.graph.eliminate_dead_code()


def _tokens_and_scores(product: Any) -> tuple[Node, Node] | None:
    """Return the states [tokens, in] that are repeated for each expert, and the scores [tokens, experts]."""
    if product.target is not aten.mul.Tensor:
        return None
    repeated, column = product.args
    if repeated.target is not aten.repeat.default or repeated.args[1][1:] != [1]:
        return None
    transposed = column.args[0]
    return (repeated.args[0], transposed.args[0]) if transposed.target is aten.transpose.int else None


def _sparse_shares(scores: Any) -> tuple[list[Node], Node, Node] | None:
    """Return the steps from numbers to shares, the numbers and their indices, if all other shares are 0."""
    steps: list[Node] = []
    while scores.target in _ELEMENTWISE:
        steps.insert(0, scores)
        scores = scores.args[0]
    if scores.target is not aten.scatter.src:
        return None
    others, _, index, numbers = scores.args
    if others.target is not aten.full.default:
        return None
    other: Any = torch.tensor(float(others.args[1]))
    for step in steps:
        target: Any = step.target
        other = target(other, *step.args[1:])
    return (steps, numbers, index) if float(other) == 0 else None


register(
    Pattern(
        "experts that see all tokens",
        serves="mixtures whose experts all see all tokens, such as Llama 4's",
        model_types=("llama4", "llama4_text"),
        example="llama4_text",
        attributes=("gate_up_proj",),
        matches=lambda traced: any(map(is_dense_experts, traced.model.modules())),
        prepare=_prepare,
        rewrites=(Rewrite(choose_experts, operators=(ALL_EXPERTS,)),),
    )
)
