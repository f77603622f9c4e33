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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"task": "sst2"}, "--task is sst2, but --reward"),
        ({"objective": "dpo"}, "--reward with --objective dpo"),
        ({"objective": "es", "estimator": "exact"}, "--estimator is exact"),
        ({"roles": ["forward", "backward"]}, "--roles lacks prefill and decode"),
        ({"epsilon": 0.1}, "--epsilon is for --objective es"),
        ({"num_generations": 1}, "--num-generations is 1"),
        ({"reward": None, "temperature": 2.0}, "--temperature is for --reward"),
        ({"reward": None, "objective": "es"}, "needs a --reward"),
    ],
)
def test_settings_that_do_not_fit_a_reward_are_refused(changes: dict[str, Any], problem: str) -> None:
    with raises(ConfigError, "settings-unusable", containing=problem):
        settings(**{"reward": "reward.py:score", **changes})


def test_the_objective_of_a_reward_decides_the_estimator() -> None:
    evolution = settings(reward="reward.yaml", objective="es")
    assert evolution.chosen_estimator == "antithetic" and evolution.is_evolution
    for objective, estimator in (("auto", None), ("grpo", None), ("grpo", "antithetic")):
        other = settings(reward="reward.yaml", objective=objective, estimator=estimator)
        assert other.chosen_estimator == estimator and not other.is_evolution


def test_a_reward_is_named_by_an_absolute_path() -> None:
    assert settings(reward="reward.py:score").resolved().reward == f"{Path('reward.py').resolve()}:score"
    assert settings(reward="a/reward.yaml").resolved().reward == str(Path("a/reward.yaml").resolve())
