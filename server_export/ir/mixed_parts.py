"""Attention over what came before a piece of a row and over the piece itself, as one operator of a graph.

    mixed_parts(before [heads, queries, past], within [heads, queries, tokens],
                past_values [heads, past, width], values [heads, tokens, width]) -> [heads, queries, width]

softmax([before, within]) [past_values, values], of scores that hold their masks. A graph keeps the operator
whole for the same reason as `softmax_parts`: its derivatives need no sum over the tokens of both parts,
whose number no input tells. What a slope's sum over all tokens is, sum_j p_j dp_j, is o . do as well (Dao et
al., "FlashAttention", arXiv 2205.14135, section B.4).
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
    """The same with a backward pass of products alone."""

    @staticmethod
    def forward(
        ctx: Any, before: torch.Tensor, within: torch.Tensor, past_values: torch.Tensor, values: torch.Tensor
    ) -> Any:
        """As it is."""
        weights = aten._softmax.default(aten.cat.default([before, within], -1), -1, False)
        past = before.shape[-1]
        of_past = aten.slice.Tensor(weights, -1, 0, past)
        of_own = aten.slice.Tensor(weights, -1, past, sys.maxsize)
        mixed = aten.bmm.default(of_past, past_values) + aten.bmm.default(of_own, values)
        ctx.save_for_backward(of_past, of_own, past_values, values, mixed)
        return mixed

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        """Slope [heads, queries, width] -> by scores and values of both parts."""
        of_past, of_own, past_values, values, mixed = ctx.saved_tensors
        total = (slope * mixed).sum(-1, keepdim=True)
        turned = slope.transpose(1, 2)

        def part(weights: torch.Tensor, mixed_in: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            by_weights = aten.bmm.default(slope, mixed_in.transpose(1, 2))
            return weights * (by_weights - total), aten.bmm.default(turned, weights).transpose(1, 2)

        by_before, by_past_values = part(of_past, past_values)
        by_within, by_values = part(of_own, values)
        return by_before, by_within, by_past_values, by_values


def _jvp(t: GraphTangents, node: Node, before: Dual, within: Dual, *mixed_in: Dual) -> Dual:
    """With p = softmax(s): d(p v) = (p ds) v + p dv - (sum of p ds) p v."""
    past = before.shape[-1]
    weights = t.call(aten.softmax.int, t.call(aten.cat.default, [before.primal, within.primal], -1), -1)
    totals, terms = [], []
    bounds = (0, past), (past, sys.maxsize)
    for scores, values, part in zip((before, within), mixed_in, bounds, strict=True):
        weight = t.call(aten.slice.Tensor, weights, -1, *part)
        weighted = t.times(*Interleaved.of(scores).meeting(weight))
        totals.append(t.total(weighted))
        terms.append(Interleaved.of(product_jvp(t, Interleaved(t, weight, weighted), values)))
    primal = t.plus(*(each.primal for each in terms))
    mixed, moved = terms[0].meeting(primal)
    moved = t.plus(moved, terms[1].meeting(primal)[1])
    total = t.reshape(t.plus(*totals), [*moved.meta["val"].shape[:-1], 1])
    return Interleaved(t, primal, t.minus(moved, t.times(total, mixed)))


def _in_core(
    writer: GraphWriter, node: Node, before: Node, within: Node, past_values: Node, values: Node
) -> Node:
    scores = writer.call(aten.cat.default, [before, within], -1)
    weights = writer.call(aten._softmax.default, scores, -1, False)
    return writer.call(aten.bmm.default, weights, writer.call(aten.cat.default, [past_values, values], 1))


row(MIXED_PARTS, category=Category.FUSED, jvp=_jvp, core=_in_core, autograd=MixedParts.apply)
