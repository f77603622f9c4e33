"""What is chosen of a value, with a way back that puts slopes at its places."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


class Gather(torch.autograd.Function):
    """Numbers at places of a dimension; autograd's own way back makes zeros of a size that no input tells."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
        """As it is."""
        ctx.dim = dim
        ctx.save_for_backward(source, index)
        return aten.gather.default(source, dim, index)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        """Slope of what was chosen -> by the source."""
        source, index = ctx.saved_tensors
        return aten.zeros_like.default(source).scatter_add(ctx.dim, index, slope), None, None


def largest(scores: torch.Tensor, count: int, dim: int = -1, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest numbers of a dimension and their places; the choice has no derivative."""
    _, index = aten.topk.default(scores.detach(), count, dim, *rest)
    return Gather.apply(scores, dim, index), index
