"""Words of the runs of end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def run_words(workshop: Path, tmp_path: Path) -> list[object]:
    """Words of a short `prge run` into `tmp_path / "run"`."""
    return [
        "--bundle", workshop / "bundle", "--train", workshop / "train.jsonl", "--dev", workshop / "dev.jsonl",
        "--task", workshop / "task.yaml", "--out", tmp_path / "run", "--steps", 12, "--evaluate-every", 4,
        "--checkpoint-every", 5, "--learning-rate", 0.01,
    ]  # fmt: skip
