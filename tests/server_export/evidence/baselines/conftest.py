"""Bundles of tiny models with rows, of the one role that a baseline needs nothing of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server_export.evidence.baselines.settings import BaselineSettings
from server_export.export import ExportConfig, export
from tests.tiny_models import LENGTH, save_model

Made = Callable[[str, Callable[[Path], object]], Path]


def make_workplace(folder: Path, architecture: str, **changes: Any) -> Path:
    """A folder with `model`, `bundle`, `train.jsonl`, `dev.jsonl` and `task.yaml`."""
    model = save_model(folder / "model", architecture)
    settings: dict[str, Any] = {"roles": ["stack"], "rank": 4, "sequence_length": LENGTH, **changes}
    export(ExportConfig(model=str(model), out=folder / "bundle", **settings))
    words = ["aa", "bb", "cc", "dd"]
    rows = [{"text": f"{words[i % 4]} {words[i // 4 % 4]}", "label": i % 4 // 2} for i in range(40)]
    for name, chosen in (("train", rows[:24]), ("dev", rows[24:])):
        lines = [json.dumps(row) + "\n" for row in chosen]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "task.yaml").write_text(
        'name: letters\ntemplate: "{text} ?"\nlabel_words: {0: " no", 1: " yes"}\ncolumns: {label: label}\n'
        "metric: accuracy\n",
        encoding="utf-8",
    )
    return folder


@pytest.fixture(scope="session")
def workplace(made_once: Made) -> Path:
    """The folder of a decoder whose linear layers are all adapted."""
    return made_once(
        "decoder-workplace", lambda folder: make_workplace(folder, "llama", target_modules="all-linear")
    )


@pytest.fixture(scope="session")
def encoder_workplace(made_once: Made) -> Path:
    """The folder of an encoder."""
    return made_once("encoder-workplace", lambda folder: make_workplace(folder, "bert"))


@pytest.fixture
def make_settings(workplace: Path, tmp_path: Path) -> Callable[..., BaselineSettings]:
    """Settings of a short run on the workplace's rows into `tmp_path / "run"`."""

    def make(folder: Path = workplace, **changes: Any) -> BaselineSettings:
        fields: dict[str, Any] = {
            "method": "backprop-lora-fa",
            "bundle": folder / "bundle",
            "model": str(folder / "model"),
            "train": folder / "train.jsonl",
            "dev": folder / "dev.jsonl",
            "task": str(folder / "task.yaml"),
            "out": tmp_path / "run",
            "steps": 12,
            "evaluate_every": 4,
            "checkpoint_every": 5,
            "learning_rate": 0.01,
            "schedule": "constant",
            "warmup": 0,
            "quiet": True,
        }
        return BaselineSettings(**{**fields, **changes})

    return make
