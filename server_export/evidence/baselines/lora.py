"""LoRA by backpropagation, with PEFT's layers: both matrices of every adapted layer.

Hu et al. 2021, arXiv 2106.09685. lora_A starts as the bundle's frozen lora_a, lora_B where the bundle's is.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from server_export.evidence.baselines.method import Backpropagation, Problem
from server_export.evidence.baselines.methods import Optimizer
from server_export.evidence.baselines.settings import BaselineSettings


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
    """Train lora_A and lora_B."""
    peft, lora_a, lora_b = insert_adapter(problem)
    return AdapterBackpropagation(problem, peft, [*lora_a, *lora_b], settings.chosen_optimizer)


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
        target_modules=[module.name for module in problem.modules],
        lora_dropout=0.0,
        bias="none",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(problem.model, config).eval()
    lora_a, lora_b = [], []
    with torch.no_grad():
        for module in problem.modules:
            layer = problem.model.get_submodule(module.name)
            lora_a.append(layer.lora_A["default"].weight)
            lora_b.append(layer.lora_B["default"].weight)
            lora_a[-1].copy_(problem.lora_a[module.name])
            lora_b[-1].copy_(problem.lora_b[module.name])
    return peft, lora_a, lora_b


def _integer_if_whole(value: float) -> float | int:
    return round(value) if abs(value - round(value)) < 1e-9 else value
