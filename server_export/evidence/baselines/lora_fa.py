"""LoRA-FA by backpropagation: lora_B alone, lora_a frozen, which is what a bundle's programs train.

Zhang et al. 2023, arXiv 2308.03303. The upper reference of every estimate of this gradient.
"""

from __future__ import annotations

from server_export.evidence.baselines.lora import AdapterBackpropagation, insert_adapter
from server_export.evidence.baselines.method import Backpropagation, Problem
from server_export.evidence.baselines.settings import BaselineSettings


def prepare(problem: Problem, settings: BaselineSettings) -> Backpropagation:
    """Train lora_B."""
    peft, _, lora_b = insert_adapter(problem)
    return AdapterBackpropagation(problem, peft, lora_b, settings.chosen_optimizer)
