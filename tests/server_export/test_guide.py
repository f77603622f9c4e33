"""Axes from gradients: the principal ones of every row's own, as autograd has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from prge.learning.examples import Example
from server_export.evidence.baselines.adapter import insert_adapter
from server_export.guide import axes_of_gradients
from tests.rows import choice, random_completions
from tests.server_export.evidence.baselines.problems import build_problem, classified_rows

COMPLETIONS = random_completions(6, 100)
CHOICES = [choice(row, [5, 6, 7, 8 + row], [10, 11, 12], row % 3) for row in range(1, 7)]


@pytest.mark.parametrize(
    ("architecture", "rows"),
    [("llama", COMPLETIONS), ("llama", CHOICES), ("bert", classified_rows())],
    ids=["completions", "candidates", "classes"],
)
def test_axes_are_principal_ones_of_the_rows_gradients(
    tmp_path: Path, architecture: str, rows: list[Example]
) -> None:
    problem, _, _ = build_problem(tmp_path / "one", architecture, rows)
    lora_b = [layer.lora_b for layer in insert_adapter(problem).values()]
    each = [torch.autograd.grad(problem.loss([row]), lora_b) for row in problem.train]
    problem, _, _ = build_problem(tmp_path / "two", architecture, rows)
    guide, shares = axes_of_gradients(problem, 2)
    for number, module in enumerate(problem.modules):
        stacked = torch.cat([gradients[number].T for gradients in each]).double().numpy()
        _, values, vectors = np.linalg.svd(stacked, full_matrices=False)
        axes = guide.axes[module.name]
        lengths = np.linalg.norm(axes, axis=1)
        np.testing.assert_allclose(np.abs((axes * vectors[:2]).sum(1)) / lengths, 1, atol=1e-3)
        np.testing.assert_allclose(lengths[1] / lengths[0], np.sqrt(values[1] / values[0]), rtol=1e-3)
        # All together as long as signs are.
        assert (lengths**2).sum() == pytest.approx(module.out_features, rel=1e-4)
        share = (values[:2] ** 2).sum() / (values**2).sum()
        assert shares[module.name] == pytest.approx(share, rel=1e-3)
