"""Every verb that loads a model refuses a damaged or malicious one with a message."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prge.cli.main import main


def configured(**change: object) -> Callable[[Path], object]:
    """Return a change of `config.json`."""

    def apply(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))

    return apply


def weighted(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Return a change of the weights file."""

    def apply(model: Path) -> None:
        path = model / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return apply


# One example of each class; test_files.py and test_loading.py in tests/server_export/checkpoint have all.
CONFIGURATIONS: dict[str, Callable[[Path], object]] = {
    "a billion layers": configured(num_hidden_layers=10**9),
    "depth": lambda model: (model / "config.json").write_text('{"a":' * 9999 + "0" + "}" * 9999),
}
WEIGHTS: dict[str, Callable[[Path], object]] = {
    "random numbers": weighted(lambda content: content[:4096] + os.urandom(len(content) - 4096)),
    "wider than its weights": configured(hidden_size=1 << 20),
    "one layer more": configured(num_hidden_layers=3, layer_types=None),
    "pickled": lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"),
}


@pytest.fixture
def damaged(workshop: Path, tmp_path: Path) -> Callable[[Callable[[Path], object]], Path]:
    """Return a damaged copy of the workshop's model."""

    def damage(change: Callable[[Path], object]) -> Path:
        model = Path(shutil.copytree(workshop / "model", tmp_path / "model"))
        change(model)
        return model

    return damage


def refused(arguments: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert main([str(word) for word in arguments]) == 2, arguments
    message = capsys.readouterr().err
    assert message.startswith(f"prge {arguments[0]}: error: ") and "Traceback" not in message
    assert len(message) < 1500
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("damage", [*CONFIGURATIONS, *WEIGHTS])
def test_every_verb_that_loads_a_model_refuses_it(
    workshop: Path,
    tmp_path: Path,
    damage: str,
    damaged: Callable[[Callable[[Path], object]], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = damaged({**CONFIGURATIONS, **WEIGHTS}[damage])
    out = tmp_path / "out"
    if damage in CONFIGURATIONS:
        refused(["estimate", "--model", model], capsys)
    refused(["export", "--model", model, "--out", out], capsys)
    rows = ["--train", workshop / "train.jsonl", "--task", workshop / "task.yaml"]
    arguments = ["--bundle", workshop / "bundle", "--model", model, "--out", out]
    refused(["baseline", "--method", "lora-fa", *arguments, *rows, "--steps", 1], capsys)
    refused(["publish", workshop / "bundle/adapter", *arguments, "--format", "merged"], capsys)
    assert not (out / "final").exists()
