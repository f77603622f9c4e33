"""Fixtures of learning while serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_runner.serving import rounds
from device_runner.serving.settings import LearnFlags
from tests.device_runner.numpy_device import Device
from tests.device_runner.serving.learning_workspace import EVERY, WORDS, Workspace
from tests.workshop import write_rows


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    device = Device(has_backward=True)
    device.replaces(monkeypatch, rounds)
    device.write_bundle(tmp_path / "bundle")
    kept = [{"prompt": f"{one} {other}", "completion": " No"} for one in WORDS[4:] for other in WORDS[4:]]
    write_rows(tmp_path / "kept.jsonl", kept)
    learn = tmp_path / "learn"
    learn.mkdir()
    flags = LearnFlags(learn=learn, learn_every=EVERY, learning_rate=0.05, learn_epochs=3)
    return Workspace(tmp_path, device, flags)
