"""MeZO: train all parameters with two forward passes, perturbed in place (Malladi et al. 2023).

    g = (L(theta + epsilon z) - L(theta - epsilon z)) / (2 epsilon)
    theta -= learning_rate * g * z

This is algorithm 1 of arXiv 2305.17333. z is generated again from the step's seed wherever it is needed, one
chunk at a time: there is never a second copy of the parameters, and nothing is saved for a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from prge.objectives.examples import Example
from server_export.evidence.baselines.method import StepResult, TrainingMethod
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BaselineSettings

# Values that are generated at once.
_CHUNK = 1 << 18


class MeZO(TrainingMethod):
    """Train with finite differences; `projected_gradient` is g of the last step."""

    def __init__(self, problem: ModelProblem, settings: BaselineSettings) -> None:
        super().__init__(problem, list(problem.model.parameters()))
        self.epsilon = settings.epsilon
        self.projected_gradient = 0.0
        self._steps = 0
        for parameter in self.trained:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.contiguous()

    @torch.no_grad()
    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """Take a step from two forward passes; perturbations are undone up to rounding."""
        self._add_noise(self.epsilon)
        above = self.problem.loss(examples).item()
        self._add_noise(-2 * self.epsilon)
        below = self.problem.loss(examples).item()
        self._add_noise(self.epsilon)
        self.projected_gradient = (above - below) / (2 * self.epsilon)
        self._add_noise(-learning_rate * self.projected_gradient)
        self._steps += 1
        return StepResult((above + below) / 2, 2 * self.problem.forward_passes(examples))

    def _add_noise(self, scale: float) -> None:
        """Add `scale` times the step's standard normal z to the parameters."""
        seed = np.random.SeedSequence([self.problem.seed, self._steps]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed >> np.uint64(1)))
        for parameter in self.trained:
            for chunk in parameter.data.view(-1).split(_CHUNK):
                chunk.add_(torch.randn(chunk.shape, generator=generator), alpha=scale)
