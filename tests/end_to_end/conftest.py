"""Runs and tunings for end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verbs import prge


@pytest.fixture
def run_arguments(workshop: Path, tmp_path: Path) -> list[object]:
    """Return arguments of a short `prge run` into `tmp_path / "run"`."""
    return [
        "--bundle", workshop / "bundle", "--train", workshop / "train.jsonl", "--dev", workshop / "dev.jsonl",
        "--task", workshop / "task.yaml", "--out", tmp_path / "run", "--steps", 12, "--eval-steps", 4,
        "--save-steps", 5, "--learning-rate", 0.01,
    ]  # fmt: skip


def tune_arguments(workshop: Path, out: Path) -> list[object]:
    """Return arguments of a short `prge tune` with a search."""
    return [
        "tune", "--bundle", workshop / "bundle", "--data", workshop / "train.jsonl",
        "--dev", workshop / "dev.jsonl", "--task", workshop / "task.yaml", "--out", out,
        "--steps", 8, "--threads", 1,
    ]  # fmt: skip


@pytest.fixture(scope="session")
def tuned(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted tuning, with its `tune-result.json` next to it."""
    out = tmp_path_factory.mktemp("tuned") / "letters"
    prge(*tune_arguments(workshop, out), "--json", out.parent / "tune-result.json")
    return out
