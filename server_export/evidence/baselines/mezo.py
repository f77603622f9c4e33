"""MeZO: all parameters by two forward passes, perturbed in place (Malladi et al. 2023, arXiv 2305.17333).

    g = (L(theta + epsilon z) - L(theta - epsilon z)) / (2 epsilon)         its algorithm 1
    theta -= learning_rate * g * z

z is drawn again from the step's seed wherever it is needed, a piece at a time: there is never a second copy
of the parameters, and nothing is kept for a backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from prge.objectives.examples import Example
from server_export.evidence.baselines.method import StepResult, TrainingMethod
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BaselineSettings

# Values that are drawn at once.
_PIECE = 1 << 18


class MeZO(TrainingMethod):
    """Steps along differences; `scalar` is the last step's projected gradient g."""

    def __init__(self, problem: ModelProblem, settings: BaselineSettings) -> None:
        super().__init__(problem, list(problem.model.parameters()))
        self.epsilon = settings.epsilon
        self.scalar = 0.0
        self._steps = 0
        for parameter in self.trained:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.contiguous()

    @torch.no_grad()
    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """Two forwards of the examples; the parameters come back to where they were but for rounding."""
        self._add_noise(self.epsilon)
        above = self.problem.loss(examples).item()
        self._add_noise(-2 * self.epsilon)
        below = self.problem.loss(examples).item()
        self._add_noise(self.epsilon)
        self.scalar = (above - below) / (2 * self.epsilon)
        self._add_noise(-learning_rate * self.scalar)
        self._steps += 1
        return StepResult((above + below) / 2, 2 * self.problem.rows(examples))

    def _add_noise(self, scale: float) -> None:
        """Add `scale` times the step's z, standard normal, to the parameters."""
        seed = np.random.SeedSequence([self.problem.seed, self._steps]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed >> np.uint64(1)))
        for parameter in self.trained:
            for piece in parameter.data.view(-1).split(_PIECE):
                piece.add_(torch.randn(piece.shape, generator=generator), alpha=scale)
