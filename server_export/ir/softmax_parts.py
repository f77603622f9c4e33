"""What one shard of a vocabulary adds to log-probabilities, as one operator of a graph.

    softmax_parts(logits [..., words], shift [..., 1], index i64 [..., 1]) -> [..., 2]

The logit at the index, and the sum of the exponentials of all, both after `shift` is taken from the logits.
With the sums of all shards, log p = logit - log(sum); `prge.numerics.vocabulary_shards` adds them up. A traced graph
keeps the operator whole, so that what is made of the graph has a short form of it and needn't look for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from server_export.ir.operators import Category, row
from server_export.ir.tangents import Dual, GraphTangents, shape_of
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten

torch.library.define("prge::softmax_parts", "(Tensor logits, Tensor shift, Tensor index) -> Tensor")


@torch.library.impl("prge::softmax_parts", "CompositeImplicitAutograd")
def _by_pytorch(logits: torch.Tensor, shift: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    shifted = logits - shift
    return torch.cat([shifted.gather(-1, index), shifted.exp().sum(-1, keepdim=True)], -1)


SOFTMAX_PARTS = torch.ops.prge.softmax_parts.default


class SoftmaxParts(torch.autograd.Function):
    """The same with a backward pass that adds the slopes of what was chosen at their places."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, shift: torch.Tensor, index: torch.Tensor) -> Any:
        """As it is; what only a forward pass needs isn't computed on the way back."""
        shifted = aten.sub.Tensor(logits, shift)
        exponentials = aten.exp.default(shifted)
        ctx.save_for_backward(exponentials, index)
        total = aten.sum.dim_IntList(exponentials, [-1], True)
        return aten.cat.default([aten.gather.default(shifted, -1, index), total], -1)

    @staticmethod
    def backward(ctx: Any, slopes: torch.Tensor) -> Any:
        """Slopes [..., 2] -> by the logits [..., words]."""
        exponentials, index = ctx.saved_tensors
        of_chosen, of_total = slopes.split(1, -1)
        return (exponentials * of_total).scatter_add(-1, index, of_chosen), None, None


def _jvp(t: GraphTangents, node: Node, logits: Dual, shift: Node, index: Node) -> Dual:
    one, shape = t.one_of(index), shape_of(index)
    shifted = t.minus(logits.primal, t.one_of(shift))
    exponentials = t.exp(shifted)

    def parts(part: Node, weighted: Node, count: int) -> Node:
        places = t.call(aten.expand.default, one, [count, *shape])
        chosen = t.call(aten.gather.default, part, -1, places)
        return t.call(aten.cat.default, [chosen, t.total(weighted)], -1)

    tangents = parts(logits.tangents, t.times(exponentials, logits.tangents), t.queries)
    return Dual(t, parts(shifted, exponentials, 1), tangents)


def _in_core(writer: GraphWriter, node: Node, logits: Node, shift: Node, index: Node) -> Node:
    """The shift is taken from what was chosen once more: there are far fewer of these than of all."""
    total = writer.total(writer.exp(writer.minus(logits, shift)))
    chosen = writer.minus(writer.call(aten.gather.default, logits, -1, index), shift)
    return writer.call(aten.cat.default, [chosen, total], -1)


row(SOFTMAX_PARTS, category=Category.FUSED, jvp=_jvp, core=_in_core, autograd=SoftmaxParts.apply)
