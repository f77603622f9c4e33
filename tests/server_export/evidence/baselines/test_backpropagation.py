"""Methods with exact gradients: which parameters they train, and that they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prge.errors import ConfigError
from prge.formats.adapter import views
from server_export.evidence.baselines.backpropagation import Backpropagation, prepare
from server_export.evidence.baselines.methods import METHODS
from server_export.evidence.baselines.problem import ModelProblem
from tests.refusals import raises
from tests.rows import bigram_completions
from tests.server_export.evidence.baselines.problems import (
    build_problem,
    changed,
    classified_rows,
    method_settings,
    values_of,
)

ROWS = bigram_completions(8)
BACKPROPAGATION = [name for name in METHODS if name.startswith("backprop-")]


def make(
    method: str, folder: Path, rows: Any = ROWS, architecture: str = "llama", **changes: Any
) -> tuple[ModelProblem, Backpropagation]:
    problem, _, _ = build_problem(folder, architecture, rows)
    return problem, prepare(problem, method_settings(method, **changes))


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        *(("backprop-lora-fa", name) for name in ("sgd", "momentum", "adamw")),
        *((name, "adam") for name in BACKPROPAGATION),
    ],
)
def test_every_method_learns(tmp_path: Path, method: str, optimizer: Any) -> None:
    _, trained = make(method, tmp_path, optimizer=optimizer)
    rate = 2e-3 if optimizer.startswith("adam") else 0.01
    losses = [trained.step(ROWS, rate).loss for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]
    assert trained.step(ROWS, 0.0).forward_passes == 3 * len(ROWS)


@pytest.mark.parametrize("method", ["backprop-lora-fa", "backprop-lora"])
def test_the_adapter_learns_in_float32_through_a_model_in_bfloat16(tmp_path: Path, method: str) -> None:
    problem, trained = make(method, tmp_path, dtype="bfloat16")
    exact = problem.engine.outputs(ROWS[0].sequences, problem.values)
    problem.engine.to(torch.bfloat16)
    rounded = problem.engine.outputs(ROWS[0].sequences, problem.values)
    assert rounded.dtype == exact.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.05
    losses = [trained.step(ROWS, 2e-3).loss for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]
    assert problem.adapter.values.dtype == np.float32
    assert problem.model.dtype == torch.bfloat16


@pytest.mark.parametrize("method", ["backprop-full", "mezo", "executorch-training"])
def test_other_methods_refuse_bfloat16(method: str) -> None:
    with raises(ConfigError, "settings-unusable", containing=method):
        method_settings(method, dtype="bfloat16")


@pytest.mark.parametrize("method", BACKPROPAGATION)
def test_no_other_parameter_changes(tmp_path: Path, method: str) -> None:
    problem, trained = make(method, tmp_path)
    before, start = values_of(problem), problem.adapter.copy()
    for _ in range(2):
        trained.step(ROWS, 0.01)
    assert changed(problem, before) == (set(before) if method == "backprop-full" else set())
    result = views(start.modules, problem.adapter.values)
    moved = {
        name for name, matrix in views(start.modules, start.values).items() if (matrix != result[name]).any()
    }
    letters = {"backprop-lora-fa": "b", "backprop-lora": "ab", "backprop-full": ""}[method]
    assert moved == {f"lora_{letter}.{module.name}" for letter in letters for module in start.modules}


def test_an_encoder_learns_below_its_constant_heads(tmp_path: Path) -> None:
    rows = classified_rows(64)
    problem, trained = make("backprop-lora-fa", tmp_path, rows, "bert")
    head = problem.prepare_heads().head
    assert head is not None
    values = head.values.copy()
    losses = [trained.step(rows[:16], 3e-3).loss for _ in range(10)]
    assert losses[-1] < losses[0]
    assert (head.values == values).all()
