"""Experts that all see all tokens, times shares that are 0 for most: those are found that aren't.

An expert is a block as of others, whose tokens the driver brings to it.
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
# What computes each number of a share for itself.
_OF_A_SHARE = {aten.sigmoid.default, aten.to.dtype, aten._to_copy.default}


@torch.library.custom_op("prge::all_experts", mutates_args=())
def all_experts(states: torch.Tensor, number: int, out: int) -> torch.Tensor:
    """All experts of the layer of that number, of [experts x tokens, in]: each of as many in turn."""
    raise NotImplementedError("experts are traced and become blocks, they are never run")


@all_experts.register_fake
def _(states: torch.Tensor, number: int, out: int) -> torch.Tensor:
    return states.new_empty((states.shape[0], out))


ALL_EXPERTS = torch.ops.prge.all_experts.default


def _prepare(traced: TracedModel) -> None:
    """Let all experts of a layer be one operator of the graph, in place."""
    for number, module in enumerate(expert_layers(traced.model).values()):
        if is_dense_experts(module):
            module.forward = partial(_all_asked, module, number)


def _all_asked(module: Any, number: int, states: torch.Tensor) -> torch.Tensor:
    """What all experts say, an operator of the graph."""
    said: torch.Tensor = ALL_EXPERTS(states, number, width_of(module))
    return said


def choose_experts(graph: ModelGraph) -> None:
    """Let tokens see those experts alone whose shares aren't 0, in place.

    Raises:
        Refusal: what shares are 0 isn't known.
    """
    graph_module = graph.graph_module
    writer = GraphWriter(graph_module)
    for node in graph_module.graph.find_nodes(op="call_function", target=ALL_EXPERTS):
        product, number, out = node.args
        sums, *others = (user for each in node.users for user in each.users)
        parts = _seen_and_scores(product)
        chosen = _chosen(parts[1]) if parts else None
        is_sum = sums.target is aten.sum.dim_IntList and sums.args[1:] == ([0],) and not others
        if parts is None or chosen is None or not is_sum:
            raise Refusal(
                "shares-of-experts",
                "all experts of a layer see all tokens, times shares that are computed in a way that isn't "
                "known here",
                operator=str(ALL_EXPERTS),
                remedy="take a checkpoint of another type, such as qwen3_moe, olmoe, granitemoe or mixtral",
            )
        source, (steps, shares, index) = parts[0], chosen

        def write(writer: GraphWriter, *given: Any) -> Node:
            source, steps, shares, index, number, out = given
            for step in steps:
                shares = writer.call(step.target, shares, *step.args[1:])
            index = writer.call(aten.to.dtype, index, torch.float32)
            return writer.call(EXPERTS, source, shares, index, number, out)

        writer.replace(sums, write, source, steps, shares, index, number, out)
    graph_module.graph.eliminate_dead_code()


def _seen_and_scores(product: Any) -> tuple[Node, Node] | None:
    """Of states [tokens, in] that are repeated for each expert, times scores [tokens, experts], these two."""
    if product.target is not aten.mul.Tensor:
        return None
    repeated, column = product.args
    if repeated.target is not aten.repeat.default or repeated.args[1][1:] != [1]:
        return None
    turned = column.args[0]
    return (repeated.args[0], turned.args[0]) if turned.target is aten.transpose.int else None


def _chosen(scores: Any) -> tuple[list[Node], Node, Node] | None:
    """How shares are made of numbers, the numbers, and whose they are, if all other shares are 0."""
    steps: list[Node] = []
    while scores.target in _OF_A_SHARE:
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
