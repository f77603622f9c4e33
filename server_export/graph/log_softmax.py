"""The logarithm of a softmax at one chosen place, as one operator of a graph.

    gather_log_softmax(logits [..., tokens], index i64 [..., 1]) -> [..., 1]

PyTorch computes it by its log-softmax, and differentiates that. A traced graph keeps it whole, so that what
is made of the graph has a short form of it and needn't look for it: tangents (derive/tangent/rules.py), a
backward pass (`GatherLogSoftmax`), operators of the engine (core.py).
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

LEAST_PROBABILITY = torch.finfo(torch.float32).tiny

torch.library.define("prge::gather_log_softmax", "(Tensor logits, Tensor index) -> Tensor")


@torch.library.impl("prge::gather_log_softmax", "CompositeImplicitAutograd")
def _by_pytorch(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, index)


GATHER_LOG_SOFTMAX = torch.ops.prge.gather_log_softmax.default


class GatherLogSoftmax(torch.autograd.Function):
    """The same with a backward pass that adds the slopes of what was chosen at their places."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, index: torch.Tensor) -> Any:
        """Looked up before the logarithm is taken, which ends at that of the least normal float, -87.3."""
        probabilities = aten._softmax.default(logits, -1, False)
        ctx.save_for_backward(probabilities, index)
        return aten.log.default(
            aten.clamp.default(aten.gather.default(probabilities, -1, index), LEAST_PROBABILITY)
        )

    @staticmethod
    def backward(ctx: Any, slopes: torch.Tensor) -> Any:
        """Slopes [..., 1] -> by the logits [..., tokens]."""
        probabilities, index = ctx.saved_tensors
        spread = probabilities * (slopes * -1.0)
        return spread.scatter_add(-1, index, slopes), None
