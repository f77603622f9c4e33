"""Attention over past tokens and over the tokens of a chunk, as one operator of a graph.

    mixed_parts(before [heads, queries, past], within [heads, queries, tokens],
                past_values [heads, past, width], values [heads, tokens, width]) -> [heads, queries, width]

It computes softmax([before, within]) [past_values, values]; the scores include their masks. The operator
stays whole in a graph for the same reason as `softmax_parts`: its derivatives need no sum over the tokens of
both parts, whose number no input provides. The gradient's sum over all tokens, sum_j p_j dp_j, equals o . do
(Dao et al., "FlashAttention", arXiv 2205.14135, section B.4).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.fx import Node

from server_export.ir.operators import Category, row
from server_export.ir.operators.products import product_jvp
from server_export.ir.tangents import Dual, GraphTangents, Interleaved
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten

torch.library.define(
    "prge::mixed_parts", "(Tensor before, Tensor within, Tensor past_values, Tensor values) -> Tensor"
)


@torch.library.impl("prge::mixed_parts", "CompositeImplicitAutograd")
def _by_pytorch(
    before: torch.Tensor, within: torch.Tensor, past_values: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    return torch.bmm(torch.cat([before, within], -1).softmax(-1), torch.cat([past_values, values], 1))


MIXED_PARTS = torch.ops.prge.mixed_parts.default


class MixedParts(torch.autograd.Function):
    """The operator with a backward pass that consists of matrix products."""

    @staticmethod
    def forward(
        ctx: Any, before: torch.Tensor, within: torch.Tensor, past_values: torch.Tensor, values: torch.Tensor
    ) -> Any:
        """Return the attention output [heads, queries, width]."""
        weights = aten._softmax.default(aten.cat.default([before, within], -1), -1, False)
        past = before.shape[-1]
        past_weights = aten.slice.Tensor(weights, -1, 0, past)
        own_weights = aten.slice.Tensor(weights, -1, past, sys.maxsize)
        mixed = aten.bmm.default(past_weights, past_values) + aten.bmm.default(own_weights, values)
        ctx.save_for_backward(past_weights, own_weights, past_values, values, mixed)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Return the gradients of both parts' scores and values from grad_output [heads, queries, width]."""
        past_weights, own_weights, past_values, values, mixed = ctx.saved_tensors
        weighted_sum = (grad_output * mixed).sum(-1, keepdim=True)
        grad_output_transposed = grad_output.transpose(1, 2)

        def gradients_of_part(
            weights: torch.Tensor, part_values: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            grad_weights = aten.bmm.default(grad_output, part_values.transpose(1, 2))
            return weights * (grad_weights - weighted_sum), aten.bmm.default(
                grad_output_transposed, weights
            ).transpose(1, 2)

        grad_before, grad_past_values = gradients_of_part(past_weights, past_values)
        grad_within, grad_values = gradients_of_part(own_weights, values)
        return grad_before, grad_within, grad_past_values, grad_values


def _jvp(t: GraphTangents, node: Node, before: Dual, within: Dual, *mixed_in: Dual) -> Dual:
    """Write d(p v) = (p ds) v + p dv - (sum of p ds) p v, where p = softmax(s)."""
    past = before.shape[-1]
    weights = t.call(aten.softmax.int, t.call(aten.cat.default, [before.primal, within.primal], -1), -1)
    totals, terms = [], []
    bounds = (0, past), (past, sys.maxsize)
    for scores, values, part in zip((before, within), mixed_in, bounds, strict=True):
        weight = t.call(aten.slice.Tensor, weights, -1, *part)
        weighted = t.times(*Interleaved.of(scores).broadcastable(weight))
        totals.append(t.total(weighted))
        terms.append(Interleaved.of(product_jvp(t, Interleaved(t, weight, weighted), values)))
    primal = t.plus(*(each.primal for each in terms))
    primal_part, tangents = terms[0].broadcastable(primal)
    tangents = t.plus(tangents, terms[1].broadcastable(primal)[1])
    total = t.reshape(t.plus(*totals), [*tangents.meta["val"].shape[:-1], 1])
    return Interleaved(t, primal, t.minus(tangents, t.times(total, primal_part)))


def _in_core(
    writer: GraphWriter, node: Node, before: Node, within: Node, past_values: Node, values: Node
) -> Node:
    scores = writer.call(aten.cat.default, [before, within], -1)
    weights = writer.call(aten._softmax.default, scores, -1, False)
    return writer.call(aten.bmm.default, weights, writer.call(aten.cat.default, [past_values, values], 1))


row(MIXED_PARTS, category=Category.FUSED, jvp=_jvp, core=_in_core, autograd=MixedParts.apply)
