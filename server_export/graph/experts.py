"""The experts of a layer as one operator of a graph, which is cut there: every expert is a block of its own.

    experts(states [..., in], shares [..., chosen], index f32 [..., chosen], number, out) -> [..., out]

A token's answer is the sum of what its chosen experts make of it, each times its share. The operator is
traced and never run: `prge.learning.experts` brings tokens to experts and adds up what they answer.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("prge::experts", mutates_args=())
def experts(
    states: torch.Tensor, shares: torch.Tensor, index: torch.Tensor, number: int, out: int
) -> torch.Tensor:
    """The experts of the layer of that number."""
    raise NotImplementedError("experts are traced and become blocks, they are never run")


@experts.register_fake
def _(states: torch.Tensor, shares: torch.Tensor, index: torch.Tensor, number: int, out: int) -> torch.Tensor:
    return states.new_empty((*states.shape[:-1], out))


EXPERTS = torch.ops.prge.experts.default
