"""Exact gradients by backpropagation: of every parameter, of LoRA, or of lora_B alone.

    backprop-full      every parameter of the model
    backprop-lora      both matrices of every adapted layer (Hu et al. 2021, arXiv 2106.09685)
    backprop-lora-fa   lora_B alone, what a bundle's programs train (Zhang et al. 2023, arXiv 2308.03303)

LoRA is in PEFT's layers; lora_A starts as the bundle's frozen lora_a, lora_B where the bundle's is.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prge.contract import ROWS_OF_A_WAY_BACK
from prge.learning.examples import Example
from server_export.evidence.baselines.method import Problem, StepResult
from server_export.evidence.baselines.methods import ADAM, Optimizer
from server_export.evidence.baselines.settings import BaselineSettings


class Backpropagation:
    """Steps along exact gradients of some of a model's parameters; the others are frozen."""

    def __init__(
        self,
        problem: Problem,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer = ADAM,
        prior_rows: int = 0,
    ) -> None:
        self.problem = problem
        self.prior_rows = prior_rows
        self._trained = list(parameters)
        chosen = {id(parameter) for parameter in self._trained}
        for parameter in problem.model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        self._optimizer = make_torch_optimizer(optimizer, self._trained)

    def parameters(self) -> list[nn.Parameter]:
        """What it trains."""
        return self._trained

    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """One forward, one backward, one optimizer step."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad()
        loss = self.problem.loss(examples)
        torch.autograd.backward(loss)
        self.shape_gradients()
        self._optimizer.step()
        return StepResult(loss.item(), ROWS_OF_A_WAY_BACK * self.problem.rows(examples))

    def shape_gradients(self) -> None:
        """Called between the backward and the optimizer, for methods that change gradients."""


class AdapterBackpropagation(Backpropagation):
    """Exact gradients of an adapter in PEFT's layers; its result is a PEFT folder."""

    def __init__(
        self, problem: Problem, peft: Any, parameters: Sequence[nn.Parameter], optimizer: Optimizer
    ) -> None:
        super().__init__(problem, parameters, optimizer)
        self._peft = peft

    def save(self, folder: Path) -> None:
        """Write the adapter as PEFT does."""
        head = getattr(self.problem.model, "get_output_embeddings", lambda: None)()
        self._peft.peft_config["default"].task_type = "FEATURE_EXTRACTION" if head is None else "CAUSAL_LM"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._peft.save_pretrained(folder)


def prepare(problem: Problem, settings: BaselineSettings) -> Backpropagation:
    """Train what the method says."""
    if settings.method == "backprop-full":
        return Backpropagation(problem, list(problem.model.parameters()), settings.chosen_optimizer)
    peft, lora_a, lora_b = insert_adapter(problem)
    trained = lora_b if settings.method == "backprop-lora-fa" else [*lora_a, *lora_b]
    return AdapterBackpropagation(problem, peft, trained, settings.chosen_optimizer)


def insert_adapter(problem: Problem) -> tuple[Any, list[nn.Parameter], list[nn.Parameter]]:
    """Put PEFT's layers with the bundle's adapter into the model.

    Returns:
        PEFT's model around it, and every layer's lora_A [rank, in] and lora_B [out, rank], in module order.
    """
    from peft import LoraConfig, get_peft_model

    ranks = {module.name: module.rank for module in problem.modules}
    alphas = {name: _integer_if_whole(problem.scales[name] * rank) for name, rank in ranks.items()}
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        rank_pattern={name: each for name, each in ranks.items() if each != rank},
        alpha_pattern={name: each for name, each in alphas.items() if each != alpha},
        target_modules=list(ranks),
        lora_dropout=0.0,
        bias="none",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(problem.model, config).eval()
    lora_a, lora_b = [], []
    with torch.no_grad():
        for name in ranks:
            layer = problem.model.get_submodule(name)
            lora_a.append(layer.lora_A["default"].weight)
            lora_b.append(layer.lora_B["default"].weight)
            lora_a[-1].copy_(problem.lora_a[name])
            lora_b[-1].copy_(problem.lora_b[name])
    return peft, lora_a, lora_b


def make_torch_optimizer(chosen: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a name; its learning rate is set before every step."""
    if chosen.name == "sgd":
        return torch.optim.SGD(parameters, lr=0.0)
    if chosen.name == "momentum":
        return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    kind = torch.optim.Adam if chosen.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=0.0, betas=(0.9, chosen.beta2))


def _integer_if_whole(value: float) -> float | int:
    return round(value) if abs(value - round(value)) < 1e-9 else value
