"""The methods that go along exact gradients: what they train, and that it is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from server_export.evidence.baselines.methods import METHODS
from server_export.evidence.baselines.runner import prepare
from server_export.evidence.baselines.settings import BaselineSettings
from tests.rows import bigram_completions
from tests.server_export.evidence.baselines.problems import build_problem, classified_rows

ROWS = bigram_completions(8)
BACKPROPAGATION = [name for name in METHODS if name.startswith("backprop-")]


def make(method: str, folder: Path, rows: Any = ROWS, architecture: str = "llama", **changes: Any) -> Any:
    settings = BaselineSettings(folder, folder, folder, method=method, model="", **changes)
    problem, _, _ = build_problem(folder, architecture, rows)
    return problem, prepare(problem, settings)


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        *(("backprop-lora-fa", name) for name in ("sgd", "momentum", "adamw")),
        *((name, "adam") for name in BACKPROPAGATION),
    ],
)
def test_it_learns(tmp_path: Path, method: str, optimizer: Any) -> None:
    _, trained = make(method, tmp_path, optimizer=optimizer)
    rate = 2e-3 if optimizer.startswith("adam") else 0.01
    losses = [trained.step(ROWS, rate).loss for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]
    assert trained.step(ROWS, 0.0).rows == 3 * len(ROWS)


@pytest.mark.parametrize("method", BACKPROPAGATION)
def test_nothing_else_moves(tmp_path: Path, method: str) -> None:
    problem, trained = make(method, tmp_path)
    chosen = {id(parameter) for parameter in trained.parameters()}
    before = {name: parameter.clone() for name, parameter in problem.model.named_parameters()}
    for _ in range(2):
        trained.step(ROWS, 0.01)
    moved = {
        name
        for name, parameter in problem.model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    assert moved == {name for name, p in problem.model.named_parameters() if id(p) in chosen}
    letters = {name.split("lora_")[1][0] for name in moved if "lora_" in name}
    assert letters == {"backprop-lora-fa": {"B"}, "backprop-lora": {"A", "B"}, "backprop-full": set()}[method]


def test_an_encoder_learns_below_its_constant_heads(tmp_path: Path) -> None:
    rows = classified_rows(64)
    problem, trained = make("backprop-lora-fa", tmp_path, rows, "bert")
    head = problem.prepare_heads().head.values.copy()
    losses = [trained.step(rows[:16], 3e-3).loss for _ in range(10)]
    assert losses[-1] < losses[0]
    assert (problem.heads.head.values == head).all()
