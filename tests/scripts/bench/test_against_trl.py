"""Preferences have the same losses as TRL's trainers in the same steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from against_trl import DEMO, loss_difference, run_both

from tests.verbs import prge
from tests.workshop import FolderBuilder


@pytest.fixture(scope="module")
def demo_bundle(made_once: FolderBuilder) -> Path:
    """Return the demo's model with LoRA on all linear layers."""
    arguments = ["--target-modules", "all-linear", "--adapter", "lora", "--roles", "backward"]

    def make(folder: Path) -> None:
        prge("export", "--model", DEMO / "model", "--out", folder / "bundle", *arguments)

    return made_once("demo-lora", make) / "bundle"


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="takes the package trl")
@pytest.mark.parametrize("objective", ["dpo", "ipo", "simpo", "kto", "orpo"])
def test_losses_are_those_of_trl(objective: str, demo_bundle: Path, tmp_path: Path) -> None:
    actual, expected = run_both(objective, DEMO / "model", demo_bundle, tmp_path, steps=20)
    assert len(actual.losses) == len(expected.losses) == 20
    # Losses that never changed would prove little.
    assert max(actual.losses) - min(actual.losses) > 1e-3
    assert loss_difference(actual, expected) < 1e-4
