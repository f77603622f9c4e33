"""Train with exact gradients by backpropagation: every parameter, LoRA, or lora_B alone.

    backprop-full      every parameter of the model
    backprop-lora      both matrices of every adapted layer (Hu et al. 2021, arXiv 2106.09685)
    backprop-lora-fa   lora_B alone, as a bundle's programs do (Zhang et al. 2023, arXiv 2308.03303)

lora_A and lora_B start with the bundle's values.
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
    """Train some parameters of a model with exact gradients; all others are frozen."""

    def __init__(
        self,
        problem: ModelProblem,
        settings: BaselineSettings,
        trained: Sequence[nn.Parameter],
        prior_passes: int = 0,
    ) -> None:
        super().__init__(problem, trained, prior_passes)
        problem.model.requires_grad_(False)
        for parameter in self.trained:
            parameter.requires_grad_(True)
        self._optimizer = _make_optimizer(settings, self.trained)

    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """Run one forward pass, one backward pass and one optimizer step."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad()
        loss = self.problem.loss(examples)
        torch.autograd.backward(loss)
        self._optimizer.step()
        return StepResult(loss.item(), BACKPROPAGATION_PASSES * self.problem.forward_passes(examples))


def prepare(problem: ModelProblem, settings: BaselineSettings) -> Backpropagation:
    """Return a training of the parameters that the method trains."""
    if settings.method == "backprop-full":
        return Backpropagation(problem, settings, list(problem.model.parameters()))
    values = problem.insert_adapter(trains_a=settings.method == "backprop-lora")
    return Backpropagation(problem, settings, [values])


def _make_optimizer(settings: BaselineSettings, trained: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the settings; every step sets its learning rate."""
    name = settings.chosen_optimizer
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(trained, lr=0.0, momentum=0.9 if name == "momentum" else 0.0)
    optimizer_class = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return optimizer_class(trained, lr=0.0, betas=(0.9, settings.adam_beta2))
