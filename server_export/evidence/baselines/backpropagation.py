"""Exact gradients by backpropagation: of every parameter, of LoRA, or of lora_B alone.

    backprop-full      every parameter of the model
    backprop-lora      both matrices of every adapted layer (Hu et al. 2021, arXiv 2106.09685)
    backprop-lora-fa   lora_B alone, what a bundle's programs train (Zhang et al. 2023, arXiv 2308.03303)

lora_A starts as the bundle's frozen lora_a, lora_B where the bundle's is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from prge.objectives.examples import Example
from prge.training.estimators.protocol import BACKPROPAGATION_PASSES
from server_export.evidence.baselines.method import StepResult, TrainingMethod
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BaselineSettings


class Backpropagation(TrainingMethod):
    """Steps along exact gradients of some of a model's parameters; the others are frozen."""

    def __init__(
        self,
        problem: ModelProblem,
        settings: BaselineSettings,
        trained: Sequence[nn.Parameter],
        prior_rows: int = 0,
    ) -> None:
        super().__init__(problem, trained, prior_rows)
        problem.model.requires_grad_(False)
        for parameter in self.trained:
            parameter.requires_grad_(True)
        self._optimizer = _make_optimizer(settings, self.trained)

    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """One forward, one backward, one optimizer step."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad()
        loss = self.problem.loss(examples)
        torch.autograd.backward(loss)
        self._optimizer.step()
        return StepResult(loss.item(), BACKPROPAGATION_PASSES * self.problem.rows(examples))


def prepare(problem: ModelProblem, settings: BaselineSettings) -> Backpropagation:
    """Train what the method says."""
    if settings.method == "backprop-full":
        return Backpropagation(problem, settings, list(problem.model.parameters()))
    values = problem.insert_adapter(trains_a=settings.method == "backprop-lora")
    return Backpropagation(problem, settings, [values])


def _make_optimizer(settings: BaselineSettings, trained: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the settings; its learning rate is set before every step."""
    name = settings.chosen_optimizer
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(trained, lr=0.0, momentum=0.9 if name == "momentum" else 0.0)
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind(trained, lr=0.0, betas=(0.9, settings.beta2))
