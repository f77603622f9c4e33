"""Rounding to int4 that compensates its own errors: GPTQ (Frantar et al., arXiv 2210.17323).

Columns of a weight are rounded one after the other, and what a column loses is taken off the columns that are
still to come, as far as the layer's inputs are correlated. Scales are symmetric, of groups of inputs, and
searched for: the largest weight of a group doesn't choose them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from server_export.quantize.quantization import GROUP_SIZE, Int4Weight

# Part of the mean of its diagonal that is added to a second moment's diagonal, as in the paper's code.
_DAMPING = 0.01
# Inputs whose second moment is kept as one matrix. Of wider layers there are several: errors are compensated
# within each, and memory grows with the width alone.
MOST_INPUTS = 4096
# Columns that are rounded before the others get their errors at once.
_COLUMNS = 128
# Factors of the smallest scale that holds all weights of a group.
_FACTORS = torch.linspace(1.0, 0.5, 21)
_LOWEST, _HIGHEST = -8, 7


class SecondMoment:
    """The second moment of a layer's inputs, in pieces of at most `MOST_INPUTS` inputs.

    Args:
        inputs: width of what the layer sees, a multiple of GROUP_SIZE.
    """

    def __init__(self, inputs: int) -> None:
        self._pieces = [torch.zeros(len(piece), len(piece)) for piece in _pieces(inputs)]
        self._tokens = 0

    @property
    def is_known(self) -> bool:
        """Whether there were as many states as inputs: fewer leave directions that nothing is known of."""
        return self._tokens >= max(map(len, self._pieces))

    def add(self, states: torch.Tensor) -> None:
        """Take states f32 [tokens, inputs]."""
        self._tokens += len(states)
        for piece, total in zip(_pieces(states.shape[1]), self._pieces, strict=True):
            part = states[:, piece.start : piece.stop]
            total.addmm_(part.T, part)

    def factors(self) -> Iterator[torch.Tensor]:
        """The upper Cholesky factor f32 of the damped inverse, for each piece."""
        for total in self._pieces:
            damped = total / max(self._tokens, 1)
            diagonal = damped.diagonal()
            # An input that was always zero says nothing: its column is rounded to the nearest.
            diagonal[diagonal == 0] = 1.0
            diagonal += _DAMPING * diagonal.mean()
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
            yield torch.linalg.cholesky(inverse, upper=True)


def _pieces(inputs: int) -> list[range]:
    """Ranges of inputs, each a multiple of GROUP_SIZE, as even as that allows."""
    groups = inputs // GROUP_SIZE
    count = -(-inputs // MOST_INPUTS)
    ends = [GROUP_SIZE * (groups * number // count) for number in range(count + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def gptq(weight: torch.Tensor, moment: SecondMoment) -> Int4Weight:
    """Round a weight f32 [out, in] to int4, given the second moment of its inputs.

    Equation 3 of the paper with the Cholesky form of its section 3.3. Rows don't depend on each other.
    """
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), weight.shape[1] // GROUP_SIZE)
    for piece, factor in zip(_pieces(weight.shape[1]), moment.factors(), strict=True):
        _round_piece(
            weight[:, piece.start : piece.stop].T.contiguous(),
            factor,
            codes[:, piece.start : piece.stop],
            scales[:, piece.start // GROUP_SIZE : piece.stop // GROUP_SIZE],
        )
    return Int4Weight(codes, scales.bfloat16())


def nearest(weight: torch.Tensor) -> Int4Weight:
    """Round a weight f32 [out, in] to int4, each number for itself, in groups of searched scales."""
    groups, importance = weight.view(len(weight), -1, GROUP_SIZE), torch.ones(GROUP_SIZE)
    flat = groups.reshape(-1, GROUP_SIZE)
    scale = searched_scale(flat, importance)
    codes = _codes(flat, scale.unsqueeze(1)).to(torch.int8)
    return Int4Weight(codes.view(weight.shape), scale.bfloat16().view(groups.shape[:2]))


def _round_piece(
    columns: torch.Tensor, factor: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Fill `codes` and `scales` of some inputs; `columns` f32 [in, out] are changed."""
    diagonal = factor.diagonal()
    for start in range(0, len(columns), _COLUMNS):
        end = min(start + _COLUMNS, len(columns))
        errors = torch.empty(end - start, columns.shape[1])
        for column in range(start, end):
            if column % GROUP_SIZE == 0:
                group = slice(column, column + GROUP_SIZE)
                scale = searched_scale(columns[group].T, diagonal[group].reciprocal().square())
                scales[:, column // GROUP_SIZE] = scale
            code = _codes(columns[column], scale)
            codes[:, column] = code
            error = (columns[column] - code * scale) / diagonal[column]
            errors[column - start] = error
            columns[column + 1 : end] -= factor[column, column + 1 : end].unsqueeze(1) * error
        columns[end:] -= factor[start:end, end:].T @ errors


def searched_scale(weights: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """Scales f32 [out], each a bfloat16, that cost groups of weights f32 [out, GROUP_SIZE] least.

    Args:
        weights: of a group of inputs.
        importance: f32 [GROUP_SIZE], what a squared error of each weight costs.
    """
    lowest, highest = weights.amin(1), weights.amax(1)
    widest = torch.maximum(highest / _HIGHEST, lowest / _LOWEST).clamp_min(1e-12)
    best, least = widest, torch.full_like(widest, torch.inf)
    for factor in _FACTORS:
        scale = (widest * factor).bfloat16().float()
        lost = weights - _codes(weights, scale.unsqueeze(1)) * scale.unsqueeze(1)
        cost = lost.square() @ importance
        best, least = torch.where(cost < least, scale, best), torch.minimum(cost, least)
    return best


def _codes(weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.round(weights / scale).clamp_(_LOWEST, _HIGHEST)
