"""Settings of a tuning that can't be used are refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prge.errors import ConfigError
from server_export.tune.settings import TuneSettings


def settings(**changes: Any) -> TuneSettings:
    return TuneSettings(**{"data": Path("rows.jsonl"), "out": Path("out"), "model": "model", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapt_time": 0.5}, "--adapt-time belongs to --adapt-layers auto"),
        ({"adapt_layers": "top:2", "search": "evolutionary"}, "--search belongs to --adapt-layers auto"),
        ({"adapt_layers": "auto", "init": "random"}, "--adapt-layers auto takes --init eva"),
        ({"adapt_layers": "auto", "adapt_time": 2.0}, "--adapt-time is 2.0"),
        (
            {"model": None, "bundle": Path("b"), "adapt_layers": "auto", "adapt_memory": 1},
            "--adapt-memory belongs to an export",
        ),
    ],
)
def test_settings_of_a_choice_of_layers_are_refused_without_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_steps_are_chosen_in_one_way() -> None:
    with pytest.raises(ConfigError, match="--steps and --epochs: each chooses the steps"):
        settings(steps=3, epochs=1.0)
    with pytest.raises(ConfigError, match="--epochs and --minutes: each chooses"):
        settings(epochs=0.5, minutes=2.0)
    with pytest.raises(ConfigError, match="--epochs is 0"):
        settings(epochs=0.0)


def test_a_choice_of_layers_has_its_settings() -> None:
    chosen = settings(adapt_layers="auto", adapt_time=0.5, adapt_memory=10**6, search="evolutionary")
    assert chosen.resolved().adapt_time == 0.5
