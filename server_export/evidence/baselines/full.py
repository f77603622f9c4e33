"""Full fine-tuning by backpropagation: every parameter of the model."""

from __future__ import annotations

from server_export.evidence.baselines.method import Backpropagation, Problem
from server_export.evidence.baselines.settings import BaselineSettings


def prepare(problem: Problem, settings: BaselineSettings) -> Backpropagation:
    """Train every parameter."""
    return Backpropagation(problem, list(problem.model.parameters()), settings.chosen_optimizer)
