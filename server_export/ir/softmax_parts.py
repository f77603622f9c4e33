"""What one piece of a vocabulary adds to log-probabilities, as one operator of a graph.

    softmax_parts(logits [..., words], shift [..., 1], index i64 [..., 1]) -> [..., 2]

The logit at the index, and the sum of the exponentials of all, both after `shift` is taken from the logits.
With the sums of all pieces, log p = logit - log(sum); `prge.learning.vocabulary` adds them up. A traced graph
keeps the operator whole, so that what is made of the graph has a short form of it and needn't look for it:
tangents (derive/tangent/rules.py), a backward pass (`SoftmaxParts`), operators of the engine (core.py).
"""

from __future__ import annotations

from typing import Any

import torch

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
