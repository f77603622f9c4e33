"""The contribution of one vocabulary shard to log-probabilities, as one operator of a graph.

    softmax_parts(logits [..., vocabulary], shift [..., 1], index i64 [..., 1]) -> [..., 2]

It returns the logit at the index, and the sum of the exponentials of all logits, both after `shift` has been
subtracted from the logits. With the sums of all shards, log p = logit - log(sum);
`prge.numerics.vocabulary_shards` combines the shards. A traced graph keeps the operator whole, so that
transformations write a short form of it and don't have to match it.
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
    """The operator with a backward pass that scatters the gradients of the selected logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, shift: torch.Tensor, index: torch.Tensor) -> Any:
        """Return [..., 2].

        Values that only the forward pass needs are not computed again in the backward pass.
        """
        shifted = aten.sub.Tensor(logits, shift)
        exponentials = aten.exp.default(shifted)
        ctx.save_for_backward(exponentials, index)
        total = aten.sum.dim_IntList(exponentials, [-1], True)
        return aten.cat.default([aten.gather.default(shifted, -1, index), total], -1)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Return the gradient of the logits [..., vocabulary] from grad_output [..., 2]."""
        exponentials, index = ctx.saved_tensors
        grad_selected, grad_total = grad_output.split(1, -1)
        return (exponentials * grad_total).scatter_add(-1, index, grad_selected), None, None


def _jvp(t: GraphTangents, node: Node, logits: Dual, shift: Node, index: Node) -> Dual:
    index_of_primal, shape = t.as_primal(index), shape_of(index)
    shifted = t.minus(logits.primal, t.as_primal(shift))
    exponentials = t.exp(shifted)

    def parts(values: Node, weighted: Node, count: int) -> Node:
        expanded = t.call(aten.expand.default, index_of_primal, [count, *shape])
        selected = t.call(aten.gather.default, values, -1, expanded)
        return t.call(aten.cat.default, [selected, t.total(weighted)], -1)

    tangents = parts(logits.tangents, t.times(exponentials, logits.tangents), t.queries)
    return Dual(t, parts(shifted, exponentials, 1), tangents)


def _in_core(writer: GraphWriter, node: Node, logits: Node, shift: Node, index: Node) -> Node:
    """Write the operator, with the shift subtracted again from the few selected logits only."""
    total = writer.total(writer.exp(writer.minus(logits, shift)))
    selected = writer.minus(writer.call(aten.gather.default, logits, -1, index), shift)
    return writer.call(aten.cat.default, [selected, total], -1)


row(SOFTMAX_PARTS, category=Category.FUSED, jvp=_jvp, core=_in_core, autograd=SoftmaxParts.apply)
