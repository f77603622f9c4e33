"""Reports that a fleet's device sends, as functions of its rows' gradients that an adversary knows too.

    exact      every value of the gradient with respect to lora_b
    top        its largest values and their indices
    scalars    projected gradients: projections on directions from known seeds

A report is the mean over the rows of a batch. With noise, every row's contribution is clipped first, as in
local differential privacy: its gradient's norm, or the root mean square of its projected gradients in a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from prge.model_spec import AdaptedModule
from prge.training.estimators.directions import RankOneDirections

# Relative difference between two machines' arithmetic in a report without noise.
_ARITHMETIC_ERROR = 1e-3
# Maximum number of columns of a linear system that is solved for a gradient.
MAX_SOLVED_SIZE = 4096


@dataclass(frozen=True)
class ReportView:
    """The part of a gradient that a report contains: everything, some indices, or projections.

    Attributes:
        indices: i64 [values], the values that are sent; None: all.
        directions: f32 [values, size], directions that the gradient is projected on; None: no projection.
        queries: number of directions in a step.
        max_grad_norm: bound of a row's contribution: of its gradient's norm, or of the root mean square of
            its projected gradients in a step; 0: no bound.
    """

    indices: torch.Tensor | None = None
    directions: torch.Tensor | None = None
    queries: int = 1
    max_grad_norm: float = 0.0

    def __call__(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return every row's contribution to a report, [rows, values], from gradients [rows, size]."""
        if self.directions is not None:
            projected_gradients = gradients @ self.directions.T
            if not self.max_grad_norm:
                return projected_gradients
            steps = projected_gradients.unflatten(1, (-1, self.queries))
            sizes = steps.square().mean(2, keepdim=True).sqrt()
            return (steps * (self.max_grad_norm / sizes.clamp_min(self.max_grad_norm))).flatten(1)
        if self.max_grad_norm:
            norms = gradients.norm(dim=1, keepdim=True)
            gradients = gradients * (self.max_grad_norm / norms.clamp_min(self.max_grad_norm))
        return gradients if self.indices is None else gradients[:, self.indices]


@dataclass(frozen=True)
class Report:
    """A report that was sent.

    Attributes:
        view: how the values follow from gradients.
        values: f32 [values].
        batch: number of rows.
        noise: standard deviation of the noise that was added to each value.
    """

    view: ReportView
    values: torch.Tensor
    batch: int
    noise: float = 0.0

    @property
    def deviation(self) -> float:
        """The expected difference between a value of the report and that of the right guess."""
        size = float(self.values.square().mean().sqrt())
        return max(self.noise, _ARITHMETIC_ERROR * size, 1e-30)

    def distances(self, guessed: torch.Tensor) -> torch.Tensor:
        """Return the squared distances [guesses] to the reports of guesses, `guessed` [guesses, values]."""
        return (guessed - self.values).square().sum(-1)

    def log_likelihoods(self, guessed: torch.Tensor) -> torch.Tensor:
        """Return the log-likelihood of the report for each guess up to a constant, [guesses]."""
        return self.distances(guessed) / (-2 * self.deviation**2)

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient, [size], or None if the report doesn't determine it."""
        view = self.view
        if self.noise or view.indices is not None:
            return None
        if view.directions is None:
            return self.values
        count, size = view.directions.shape
        if count < size or size > MAX_SOLVED_SIZE:
            return None
        # float64, since the span check needs the small singular values of the gradient.
        least_squares = torch.linalg.lstsq(view.directions.double(), self.values.double(), driver="gels")
        return least_squares.solution


def make_report(
    view: ReportView, gradients: torch.Tensor, noise: float = 0.0, generator: torch.Generator | None = None
) -> Report:
    """Return the report that a device sends for rows.

    With noise, the clip bound is the largest norm of the rows' gradients: no gradient is clipped. The root
    mean square of a step's projected gradients is about that norm, so about half of the steps are clipped.

    Args:
        view: the part of a gradient that the report contains.
        gradients: gradients of the rows, [rows, size].
        noise: standard deviation of the noise, relative to the largest effect of a row on a step's report.
        generator: generator of the noise.
    """
    if not noise:
        return Report(view, view(gradients).mean(0), len(gradients))
    clip = float(gradients.norm(dim=1).max())
    view = replace(view, max_grad_norm=clip)
    deviation = noise * clip * math.sqrt(view.queries) / len(gradients)
    values = view(gradients).mean(0)
    values = values + deviation * torch.randn(values.shape, generator=generator)
    return Report(view, values, len(gradients), deviation)


def largest_values(gradients: torch.Tensor, share: float) -> ReportView:
    """Return a view of the largest share of the mean gradient's values by magnitude, at least one value."""
    mean = gradients.mean(0)
    return ReportView(mean.abs().topk(max(round(share * len(mean)), 1)).indices.sort().values)


def projections(modules: Sequence[AdaptedModule], seed: int, steps: int, queries: int) -> ReportView:
    """Return a view of projections on the directions of a run's first steps, as its devices make them."""
    directions = []
    for step in range(steps):
        directions_of_step = RankOneDirections(seed, step, queries, 1, tuple(modules), shared=True)
        directions += [directions_of_step(query) for query in range(queries)]
    return ReportView(directions=torch.from_numpy(np.stack(directions)), queries=queries)
