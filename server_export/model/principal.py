"""Principal directions of a layer's inputs, as rows of a `lora_a` that fits the data (EVA, arXiv 2410.07170).

A random `lora_a` of rank 1 keeps 1 / width of a layer's input, the first principal directions keep most of
it. The directions are those of the second moment, without centering: the mean is often the largest component
of a layer's inputs, and along it `lora_b` is a trained bias.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

# Directions that are kept between chunks in addition to four times the requested ones. Other directions are
# discarded, so a direction that becomes strong late lacks its first contributions.
_SPARE = 128
_CHUNK = 256
# A direction with a smaller share of the inputs' mean square is a rounding error.
_MIN_SHARE = 1e-9


@dataclass(frozen=True)
class PrincipalDirections:
    """The leading principal directions of a layer's inputs.

    Attributes:
        rows: f32 [count, in], orthonormal, the strongest direction first.
        shares: f64 [count], the share of the inputs' mean square that each direction explains.
    """

    rows: torch.Tensor
    shares: torch.Tensor

    def lora_a(self, rank: int) -> torch.Tensor:
        """Return the first `rank` directions f32 [rank, in], scaled for the usual learning rates.

        On the states that the directions were computed from, each row's output has a mean square of 1 / (3
        in) of the states' mean square. That is the average for a row of PEFT's random `lora_a`, uniform
        within 1 / sqrt(in). So a step of `lora_b` changes the layer's output as much as with PEFT's, and no
        direction dominates.
        """
        rows = self.rows[:rank]
        lengths = (3 * rows.shape[1] * self.shares[:rank]).rsqrt()
        return (rows * lengths.float().unsqueeze(1)).contiguous()


class IncrementalSVD:
    """Principal directions of states that are added in chunks, in constant memory.

    The states so far are represented by their leading singular vectors, scaled by the singular values
    (incremental SVD: Ross et al. 2008). This is exact if the states have no more directions than are kept.

    Args:
        width: the width of a state.
        count: the number of directions to return.

    Attributes:
        rows: f32 [kept, width], the representation of the states so far.
    """

    def __init__(self, width: int, count: int) -> None:
        self._count = count
        self._kept = min(width, 4 * count + _SPARE)
        self.rows = torch.zeros(0, width)
        self._square = 0.0

    def add(self, states: torch.Tensor) -> None:
        """Add states f32 [n, width]."""
        self._square += float(torch.linalg.vector_norm(states, dtype=torch.float64)) ** 2
        for chunk in states.split(_CHUNK):
            self.rows = torch.cat([self.rows, chunk])
            if len(self.rows) >= self._kept + _CHUNK:
                self.rows = self._leading()[: self._kept]

    def directions(self) -> PrincipalDirections:
        """Return the strongest directions: `count`, or fewer if the states have fewer."""
        rows = self._leading()[: self._count].double()
        squares = rows.square().sum(1)
        shares = squares / max(self._square, 1e-300)
        rows, shares, squares = (each[shares > _MIN_SHARE] for each in (rows, shares, squares))
        rows = rows / squares.sqrt().unsqueeze(1)
        # The sign of a singular vector is arbitrary; it is fixed so that all machines agree.
        signs = torch.where(rows.sum(1, keepdim=True) < 0, -1.0, 1.0)
        return PrincipalDirections((rows * signs).float(), shares)

    def _leading(self) -> torch.Tensor:
        """Return the singular vectors times their singular values, the strongest first."""
        held = self.rows.double()
        if len(held) <= held.shape[1]:
            _, vectors = torch.linalg.eigh(held @ held.T)
            return (vectors.flip(1).T @ held).float()
        values, vectors = torch.linalg.eigh(held.T @ held)
        return (vectors.flip(1).T * values.flip(0).clamp_min(0).sqrt().unsqueeze(1)).float()


def spread_ranks(
    shares: Mapping[str, Sequence[float]], outputs: Mapping[str, int], rank: int
) -> dict[str, int]:
    """Return ranks from 1 to 2 x `rank` that explain most with the parameters of equal ranks.

    Ranks grow greedily by the direction that explains most per trainable parameter.

    Args:
        shares: by layer, the shares of its inputs' mean square that its directions explain, in descending
            order.
        outputs: by layer, the number of trainable parameters per direction.
        rank: the average rank.
    """
    ranks = dict.fromkeys(shares, 1)
    budget = (rank - 1) * sum(outputs[name] for name in shares)
    # Of equal gains, the first layer's comes first.
    candidates = [
        (-share[1] / outputs[name], order, name)
        for order, (name, share) in enumerate(shares.items())
        if len(share) > 1
    ]
    heapq.heapify(candidates)
    while candidates:
        _, order, name = heapq.heappop(candidates)
        if outputs[name] > budget or ranks[name] == 2 * rank:
            continue
        ranks[name] += 1
        budget -= outputs[name]
        if ranks[name] < len(shares[name]):
            heapq.heappush(candidates, (-shares[name][ranks[name]] / outputs[name], order, name))
    return ranks
