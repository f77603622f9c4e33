"""Rounding to int4 that compensates its own errors: GPTQ (Frantar et al., arXiv 2210.17323).

The columns of a weight are rounded one after the other, and the error of each column is subtracted from the
columns that are not yet rounded, as far as the layer's inputs are correlated. Scales are symmetric and per
group of inputs. They are searched for instead of following from the largest weight of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from server_export.quantize.quantization import GROUP_SIZE, Int4Weight

# Share of the mean of a second moment's diagonal that is added to the diagonal, as in the paper's code.
_DAMPING = 0.01
# Inputs per second moment. Wider layers have several moments: errors are compensated within each, and memory
# grows linearly with the width.
MAX_INPUTS = 4096
# Columns that are rounded before their errors are applied to all later columns at once.
_COLUMNS = 128
# Candidates for a group's scale, relative to the smallest scale that covers all of its weights.
_FACTORS = torch.linspace(1.0, 0.5, 21)
_LOWEST, _HIGHEST = -8, 7


class SecondMoment:
    """The second moment of a layer's inputs, in ranges of at most `MAX_INPUTS` inputs.

    Args:
        inputs: the width of the layer's inputs, a multiple of GROUP_SIZE.
    """

    def __init__(self, inputs: int) -> None:
        self._moments = [
            torch.zeros(len(range_of_inputs), len(range_of_inputs))
            for range_of_inputs in _input_ranges(inputs)
        ]
        self._tokens = 0

    @property
    def is_known(self) -> bool:
        """Whether there were at least as many states as inputs, so that every direction is measured."""
        return self._tokens >= max(map(len, self._moments))

    def add(self, states: torch.Tensor) -> None:
        """Add states f32 [tokens, inputs]."""
        self._tokens += len(states)
        for range_of_inputs, total in zip(_input_ranges(states.shape[1]), self._moments, strict=True):
            selected = states[:, range_of_inputs.start : range_of_inputs.stop]
            total.addmm_(selected.T, selected)

    def factors(self) -> Iterator[torch.Tensor]:
        """Yield the upper Cholesky factor f32 of the damped inverse for each range of inputs."""
        for total in self._moments:
            damped = total / max(self._tokens, 1)
            diagonal = damped.diagonal()
            # A column whose input was always zero is rounded to the nearest.
            diagonal[diagonal == 0] = 1.0
            diagonal += _DAMPING * diagonal.mean()
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
            yield torch.linalg.cholesky(inverse, upper=True)


def _input_ranges(inputs: int) -> list[range]:
    """Return ranges of inputs of nearly equal size, each a multiple of GROUP_SIZE."""
    groups = inputs // GROUP_SIZE
    count = -(-inputs // MAX_INPUTS)
    ends = [GROUP_SIZE * (groups * number // count) for number in range(count + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def gptq(weight: torch.Tensor, moment: SecondMoment) -> Int4Weight:
    """Round a weight f32 [out, in] to int4, given the second moment of its inputs.

    This is equation 3 of the paper in the Cholesky form of its section 3.3. Rows are independent.
    """
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), weight.shape[1] // GROUP_SIZE)
    for inputs, factor in zip(_input_ranges(weight.shape[1]), moment.factors(), strict=True):
        _round_range(
            weight[:, inputs.start : inputs.stop].T.contiguous(),
            factor,
            codes[:, inputs.start : inputs.stop],
            scales[:, inputs.start // GROUP_SIZE : inputs.stop // GROUP_SIZE],
        )
    return Int4Weight(codes, scales.bfloat16())


def round_to_nearest(weight: torch.Tensor) -> Int4Weight:
    """Round each value of a weight f32 [out, in] to the nearest int4 code, with searched scales per group."""
    groups, importance = weight.view(len(weight), -1, GROUP_SIZE), torch.ones(GROUP_SIZE)
    flat = groups.reshape(-1, GROUP_SIZE)
    scale = search_scale(flat, importance)
    codes = _codes(flat, scale.unsqueeze(1)).to(torch.int8)
    return Int4Weight(codes.view(weight.shape), scale.bfloat16().view(groups.shape[:2]))


def _round_range(
    columns: torch.Tensor, factor: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Fill `codes` and `scales` of a range of inputs; changes `columns` f32 [in, out]."""
    diagonal = factor.diagonal()
    for start in range(0, len(columns), _COLUMNS):
        end = min(start + _COLUMNS, len(columns))
        errors = torch.empty(end - start, columns.shape[1])
        for column in range(start, end):
            if column % GROUP_SIZE == 0:
                group = slice(column, column + GROUP_SIZE)
                scale = search_scale(columns[group].T, diagonal[group].reciprocal().square())
                scales[:, column // GROUP_SIZE] = scale
            code = _codes(columns[column], scale)
            codes[:, column] = code
            error = (columns[column] - code * scale) / diagonal[column]
            errors[column - start] = error
            columns[column + 1 : end] -= factor[column, column + 1 : end].unsqueeze(1) * error
        columns[end:] -= factor[start:end, end:].T @ errors


def search_scale(weights: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """Return the bfloat16 scales f32 [out] with the smallest error of weights f32 [out, GROUP_SIZE].

    Args:
        weights: the weights of a group of inputs.
        importance: f32 [GROUP_SIZE], the cost of each weight's squared error.
    """
    lowest, highest = weights.amin(1), weights.amax(1)
    widest = torch.maximum(highest / _HIGHEST, lowest / _LOWEST).clamp_min(1e-12)
    best, least = widest, torch.full_like(widest, torch.inf)
    for factor in _FACTORS:
        scale = (widest * factor).bfloat16().float()
        errors = weights - _codes(weights, scale.unsqueeze(1)) * scale.unsqueeze(1)
        cost = errors.square() @ importance
        best, least = torch.where(cost < least, scale, best), torch.minimum(cost, least)
    return best


def _codes(weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.round(weights / scale).clamp_(_LOWEST, _HIGHEST)
