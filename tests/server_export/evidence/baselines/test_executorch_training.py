"""ExecuTorch's own training on a whole decoder: its losses and gradients are autograd's, and it learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prge.errors import ConfigError
from prge.files.bundle import open_bundle
from prge.files.peft import read_peft
from server_export.evidence.baselines.command import run
from server_export.evidence.baselines.executorch_training import ExecutorchTraining
from server_export.export import ExportConfig, export
from server_export.oracle import split_values
from tests.refusals import raises
from tests.rows import choice, random_completions
from tests.server_export.evidence.baselines.problems import build_problem, classified_rows, method_settings
from tests.tiny_models import LENGTH

TINY = {"num_hidden_layers": 1}
SETTINGS = method_settings("executorch-training")


@pytest.mark.parametrize(
    "rows",
    [
        random_completions(4, 100),
        [choice(i, [5, 6, 7 + i], [10, 11, 12][: 2 + i % 2], i % 2) for i in range(4)],
    ],
    ids=["completions", "candidates"],
)
def test_a_step_is_one_of_backpropagation(tmp_path: Path, rows: Any) -> None:
    method = ExecutorchTraining(build_problem(tmp_path / "a", "llama", rows, 0.1, TINY)[0], SETTINGS)
    problem, _, _ = build_problem(tmp_path / "b", "llama", rows, 0.1, TINY)
    values = problem.insert_adapter()
    for _ in range(3):
        loss = problem.loss(rows)
        (gradient,) = torch.autograd.grad(loss, values)
        expected = split_values(problem.adapter.modules, gradient).values()
        result = method.step(rows, 0.5)
        assert result.loss == pytest.approx(loss.item(), abs=1e-5)
        for found, exact in zip(method.named_gradients().values(), expected, strict=True):
            assert torch.allclose(found.T, exact, atol=1e-5)
        with torch.no_grad():
            values -= 0.5 * gradient
        assert torch.allclose(method.trained[0], values, atol=1e-5)


@pytest.mark.whole
def test_a_run_learns_and_is_scored(
    make_settings: Callable[..., Any], workshop: Path, tmp_path: Path
) -> None:
    own = tmp_path / "bundle"
    export(
        ExportConfig(
            model=str(workshop / "model"),
            out=own,
            roles=["stack"],
            rank=4,
            sequence_length=LENGTH,
            target_modules="all-linear",
        )
    )
    settings = make_settings(
        method="executorch-training",
        bundle=own,
        steps=30,
        learning_rate=1.0,
        test=workshop / "train.jsonl",
    )
    run(settings)
    train = json.loads((settings.out / "run.json").read_text())["train"]
    assert train["test"]["loss"] < 0.3
    bundle = open_bundle(settings.bundle)
    adapter = read_peft(settings.out / "final", bundle.chain.modules)
    assert np.abs(adapter.values).max() > 0.01
    assert train["best"]["loss"] < 0.3


def test_encoders_are_refused(tmp_path: Path) -> None:
    problem, _, _ = build_problem(tmp_path, "bert", classified_rows(8))
    with raises(ConfigError, "bundle-unfit"):
        ExecutorchTraining(problem, SETTINGS)
