"""Settings of a tuning that can't be used are refused before anything is read."""

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
def test_settings_of_an_export_are_refused_beside_a_bundle(name: str) -> None:
    with raises(ConfigError, "settings-unusable", saying=f"--{name.replace('_', '-')}"):
        settings(model=None, bundle=Path("b"), **{name: "top:2"})


def test_steps_are_chosen_in_one_way() -> None:
    with raises(ConfigError, "settings-unusable", saying="--steps and --epochs"):
        settings(steps=3, epochs=1.0)
    with raises(ConfigError, "settings-unusable", saying="--epochs and --minutes"):
        settings(epochs=0.5, minutes=2.0)
    with raises(ConfigError, "settings-unusable", saying="--epochs is 0"):
        settings(epochs=0.0)
