"""What a device of a fleet sends of its rows, as a function of their gradients that an adversary knows too.

    exact      every value of the gradient by lora_b
    top        the largest values of it, and where they are
    scalars    its projections on directions that follow from known seeds

A report is the mean over the rows of a batch. With noise every row's part is clipped before, as in local
differential privacy: its gradient's norm, or the root mean square of its scalars of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from prge.model_spec import AdaptedModule
from prge.training.estimators.directions import RankOneDirections

# Of an honest report without noise: what two machines' arithmetic differ by, as a share of its size.
_ARITHMETIC = 1e-3
# Largest matrix that is solved for a gradient, in columns.
MOST_SOLVED = 4096


@dataclass(frozen=True)
class ReportView:
    """What a report shows of a gradient: all, some `places` i64 [numbers], or its `directions`.

    `directions` f32 [numbers, size] are the rows of a matrix, `queries` of them a step's. `clip` bounds what
    a row adds: the norm of its gradient, or the root mean square of its scalars of a step; 0 leaves them.
    """

    places: torch.Tensor | None = None
    directions: torch.Tensor | None = None
    queries: int = 1
    clip: float = 0.0

    def __call__(self, gradients: torch.Tensor) -> torch.Tensor:
        """Every row's part of a report, [rows, numbers], of gradients [rows, size]."""
        if self.directions is not None:
            scalars = gradients @ self.directions.T
            if not self.clip:
                return scalars
            steps = scalars.unflatten(1, (-1, self.queries))
            sizes = steps.square().mean(2, keepdim=True).sqrt()
            return (steps * (self.clip / sizes.clamp_min(self.clip))).flatten(1)
        if self.clip:
            norms = gradients.norm(dim=1, keepdim=True)
            gradients = gradients * (self.clip / norms.clamp_min(self.clip))
        return gradients if self.places is None else gradients[:, self.places]


@dataclass(frozen=True)
class Report:
    """The numbers that were sent, f32 [numbers], for how many rows, and how they come from gradients.

    `noise` is the standard deviation of what was added to each number.
    """

    view: ReportView
    numbers: torch.Tensor
    batch: int
    noise: float = 0.0

    @property
    def deviation(self) -> float:
        """What a number of the right guess may differ by."""
        size = float(self.numbers.square().mean().sqrt())
        return max(self.noise, _ARITHMETIC * size, 1e-30)

    def distances(self, seen: torch.Tensor) -> torch.Tensor:
        """Squared distance to each of some guesses, [guesses]; `seen` [guesses, numbers]."""
        return (seen - self.numbers).square().sum(-1)

    def log_likelihoods(self, seen: torch.Tensor) -> torch.Tensor:
        """Logarithm of how likely the report is after each guess, but for a constant, [guesses]."""
        return self.distances(seen) / (-2 * self.deviation**2)

    def gradient(self) -> torch.Tensor | None:
        """The gradient, [size], where the report determines it; None where it doesn't."""
        view = self.view
        if self.noise or view.places is not None:
            return None
        if view.directions is None:
            return self.numbers
        count, size = view.directions.shape
        if count < size or size > MOST_SOLVED:
            return None
        # In float64: the span check asks for the small singular values of what comes out.
        least_squares = torch.linalg.lstsq(view.directions.double(), self.numbers.double(), driver="gels")
        return least_squares.solution


def sent(
    view: ReportView, gradients: torch.Tensor, noise: float = 0.0, generator: torch.Generator | None = None
) -> Report:
    """The report of rows.

    With noise the clip is the largest norm of the rows' gradients: no gradient is cut, and of a step's
    scalars, whose root mean square is about that norm, about every other one's.

    Args:
        view: what the report shows.
        gradients: of the rows, [rows, size].
        noise: its deviation, as a share of what one row can change a step's report by.
        generator: of the noise.
    """
    if not noise:
        return Report(view, view(gradients).mean(0), len(gradients))
    clip = float(gradients.norm(dim=1).max())
    view = replace(view, clip=clip)
    deviation = noise * clip * math.sqrt(view.queries) / len(gradients)
    numbers = view(gradients).mean(0)
    numbers = numbers + deviation * torch.randn(numbers.shape, generator=generator)
    return Report(view, numbers, len(gradients), deviation)


def largest(gradients: torch.Tensor, share: float) -> ReportView:
    """The view of that share of the mean's values which is largest by size, one at least."""
    mean = gradients.mean(0)
    return ReportView(mean.abs().topk(max(round(share * len(mean)), 1)).indices.sort().values)


def directions_of(modules: Sequence[AdaptedModule], seed: int, steps: int, queries: int) -> ReportView:
    """The view along the directions of a run's first steps, as its devices make them."""
    directions = []
    for step in range(steps):
        of_step = RankOneDirections(seed, step, queries, 1, tuple(modules), shared=True)
        directions += [of_step(query) for query in range(queries)]
    return ReportView(directions=torch.from_numpy(np.stack(directions)), queries=queries)
