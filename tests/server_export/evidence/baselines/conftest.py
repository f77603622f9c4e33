"""Settings of short runs on the rows of the shared tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server_export.evidence.baselines.settings import BaselineSettings


@pytest.fixture
def make_settings(workshop: Path, tmp_path: Path) -> Callable[..., BaselineSettings]:
    """Return a function that makes settings of a short run on the workshop's rows into `tmp_path / "run"`."""

    def make(folder: Path = workshop, **changes: Any) -> BaselineSettings:
        fields: dict[str, Any] = {
            "method": "backprop-lora-fa",
            "bundle": folder / "bundle",
            "model": str(folder / "model"),
            "train": folder / "train.jsonl",
            "dev": folder / "dev.jsonl",
            "task": str(folder / "task.yaml"),
            "out": tmp_path / "run",
            "steps": 12,
            "eval_steps": 4,
            "save_steps": 5,
            "learning_rate": 0.01,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "quiet": True,
        }
        return BaselineSettings(**{**fields, **changes})

    return make
