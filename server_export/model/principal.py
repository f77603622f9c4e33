"""Principal directions of what a layer sees: rows of a `lora_a` that come from data (EVA, arXiv 2410.07170).

A random row of rank 1 catches 1 / width of a layer's input, the first principal directions catch most of it.
They are those of the mean square, without centring: the mean of a layer's inputs is often what is largest in
them, and along it `lora_b` is a bias that is learnt.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

# Directions that are kept between pieces, beside four times those that are asked for: what lies beyond is
# forgotten, so a direction that rises late among them would lack its beginning.
_SPARE = 128
_PIECE = 256
# A direction with less of the inputs' mean square is rounding.
_LEAST_SHARE = 1e-9


@dataclass(frozen=True)
class Directions:
    """Leading directions of a layer's inputs.

    `rows` f32 [count, in] are orthonormal, the strongest first; `shares` f64 [count] what each explains of
    the inputs' mean square.
    """

    rows: torch.Tensor
    shares: torch.Tensor

    def lora_a(self, rank: int) -> torch.Tensor:
        """The first `rank` directions f32 [rank, in], as long as a run at the usual rates needs them.

        Over the states that they were made of, each gives what a row of PEFT's random `lora_a`, uniform
        within 1 / sqrt(in), gives on average: 1 / (3 in) of the mean square of the states. So a step of
        `lora_b` changes the layer's output as much, and no direction drowns the others.
        """
        rows = self.rows[:rank]
        lengths = (3 * rows.shape[1] * self.shares[:rank]).rsqrt()
        return (rows * lengths.float().unsqueeze(1)).contiguous()


class Principal:
    """Directions of states that come in pieces; memory doesn't grow with their number.

    The leading singular vectors of what came so far stand for it, each as long as its singular value
    (incremental SVD: Ross et al. 2008). It is exact where no more than `kept` directions are used.

    Args:
        width: numbers of a state.
        count: directions that will be asked for.

    Attributes:
        rows: f32 [held, width], what stands for the states so far.
    """

    def __init__(self, width: int, count: int) -> None:
        self._count = count
        self._kept = min(width, 4 * count + _SPARE)
        self.rows = torch.zeros(0, width)
        self._square = 0.0

    def add(self, states: torch.Tensor) -> None:
        """Take states f32 [n, width]."""
        self._square += float(torch.linalg.vector_norm(states, dtype=torch.float64)) ** 2
        for piece in states.split(_PIECE):
            self.rows = torch.cat([self.rows, piece])
            if len(self.rows) >= self._kept + _PIECE:
                self.rows = self._leading()[: self._kept]

    def directions(self) -> Directions:
        """The strongest of them; fewer than were asked for where the states have fewer."""
        rows = self._leading()[: self._count].double()
        squares = rows.square().sum(1)
        shares = squares / max(self._square, 1e-300)
        rows, shares, squares = (each[shares > _LEAST_SHARE] for each in (rows, shares, squares))
        rows = rows / squares.sqrt().unsqueeze(1)
        # The sign of a singular vector is arbitrary: the same one on every machine.
        signs = torch.where(rows.sum(1, keepdim=True) < 0, -1.0, 1.0)
        return Directions((rows * signs).float(), shares)

    def _leading(self) -> torch.Tensor:
        """Singular vectors of what is held, times their singular values, the strongest first."""
        held = self.rows.double()
        if len(held) <= held.shape[1]:
            _, vectors = torch.linalg.eigh(held @ held.T)
            return (vectors.flip(1).T @ held).float()
        values, vectors = torch.linalg.eigh(held.T @ held)
        return (vectors.flip(1).T * values.flip(0).clamp_min(0).sqrt().unsqueeze(1)).float()


def spread_ranks(
    shares: Mapping[str, Sequence[float]], outputs: Mapping[str, int], rank: int
) -> dict[str, int]:
    """Ranks from 1 to 2 x `rank` that explain most with the trained numbers of `rank` in every layer.

    The direction that explains most for each of its numbers comes first.

    Args:
        shares: by layer, what its directions explain of its inputs' mean square, the most first.
        outputs: by layer, the numbers that a direction trains.
        rank: of a layer on average.
    """
    ranks = dict.fromkeys(shares, 1)
    left = (rank - 1) * sum(outputs[name] for name in shares)
    # Of equal gains the first layer's counts.
    ahead = [
        (-share[1] / outputs[name], place, name)
        for place, (name, share) in enumerate(shares.items())
        if len(share) > 1
    ]
    heapq.heapify(ahead)
    while ahead:
        _, place, name = heapq.heappop(ahead)
        if outputs[name] > left or ranks[name] == 2 * rank:
            continue
        ranks[name] += 1
        left -= outputs[name]
        if ranks[name] < len(shares[name]):
            heapq.heappush(ahead, (-shares[name][ranks[name]] / outputs[name], place, name))
    return ranks
