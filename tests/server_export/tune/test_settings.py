"""Unusable settings of a tuning are refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prge.errors import ConfigError
from server_export.tune.settings import TuneSettings
from tests.refusals import raises


def settings(**changes: Any) -> TuneSettings:
    return TuneSettings(**{"data": Path("rows.jsonl"), "out": Path("out"), "model": "model", **changes})


@pytest.mark.parametrize("name", ["adapt_layers", "quantize", "target_modules"])
def test_settings_of_an_export_are_refused_with_a_bundle(name: str) -> None:
    with raises(ConfigError, "settings-unusable", containing=f"--{name.replace('_', '-')}"):
        settings(model=None, bundle=Path("b"), **{name: "top:2"})


def test_only_one_setting_may_determine_the_steps() -> None:
    with raises(ConfigError, "settings-unusable", containing="--steps and --epochs"):
        settings(steps=3, epochs=1.0)
    with raises(ConfigError, "settings-unusable", containing="--epochs and --minutes"):
        settings(epochs=0.5, minutes=2.0)
    with raises(ConfigError, "settings-unusable", containing="--epochs is 0"):
        settings(epochs=0.0)
