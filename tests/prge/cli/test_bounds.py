"""Every numeric setting of a verb has bounds, and errors name the flag of a value out of bounds."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from device_runner.session.settings import RunSettings
from prge.cli.bounds import BOUNDS, Range
from prge.cli.main import VERBS
from prge.cli.settings import parse_settings
from prge.errors import ConfigError
from tests.refusals import raises


def settings_types() -> Iterator[type[Any]]:
    """Yield the settings classes of the verbs' modules."""
    for verb in VERBS.values():
        for _, settings_type in inspect.getmembers(importlib.import_module(verb.module), inspect.isclass):
            if dataclasses.is_dataclass(settings_type) and settings_type.__name__.endswith(
                ("Settings", "Config")
            ):
                yield settings_type


def is_number(settings_type: Any) -> bool:
    return settings_type in (int, float) or any(map(is_number, typing.get_args(settings_type)))


def test_every_number_of_every_verb_has_bounds() -> None:
    numbers = {
        name
        for settings_type in settings_types()
        for name, hint in typing.get_type_hints(settings_type).items()
        if is_number(hint)
    }
    assert len(numbers) > 50
    assert numbers - set(BOUNDS) == set()


@pytest.mark.parametrize(
    ("bounds", "value", "problem"),
    [
        (Range(1, 9), 1, ""),
        (Range(1, 9), 9, ""),
        (Range(1, 9), 0, "must be at least 1"),
        (Range(1, 9), 10, "must be at most 9"),
        (Range(0, 1, open=(0,)), 0.0, "must be more than 0"),
        (Range(0, 1, open=(1,)), 1.0, "must be less than 1"),
        (Range(0, 1, open=(1,)), 2.0, "must be less than 1"),
        (Range(0, 1), math.nan, "must be a finite number"),
        (Range(0, 1), math.inf, "must be a finite number"),
    ],
)
def test_a_value_outside_of_a_range_is_described(bounds: Range, value: float, problem: str) -> None:
    assert bounds.problem(value) == problem


REQUIRED = ("--bundle", "b", "--train", "t", "--out", "o")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch-size 1000000000", "--batch-size is 1000000000, must be at most 1048576"),
        (
            "--seed 18446744073709551616",
            "--seed is 18446744073709551616, must be at most 18446744073709551615",
        ),
        ("--shuffle-seed -1", "--shuffle-seed is -1, must be at least 0"),
        ("--momentum 1", "--momentum is 1.0, must be less than 1"),
        ("--adam-beta2 1", "--adam-beta2 is 1.0, must be less than 1"),
        ("--learning-rate 1e39", "--learning-rate is 1e+39, must be at most 3.4e+38"),
        ("--learning-rate nan", "--learning-rate is nan, must be a finite number"),
        ("--max-grad-norm inf", "--max-grad-norm is inf, must be a finite number"),
        ("--threads 100000", "--threads is 100000, must be at most 10000"),
        ("--steps " + "9" * 4000, "must be at most 1000000000"),
        ("--steps " + "9" * 5000, "--steps must be a whole number, not '999"),
    ],
)
def test_numbers_out_of_bounds_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(RunSettings, [*REQUIRED, *arguments.split()], "prge run")
    (problem,) = caught.value.problems
    assert message in problem
    assert len(problem) < 300


def test_settings_created_without_a_command_line_are_checked_too() -> None:
    with raises(ConfigError, "settings-unusable", containing="--batch-size"):
        RunSettings(bundle=Path("b"), train=Path("t"), out=Path("o"), batch_size=0)


def test_the_defaults_are_within_their_bounds() -> None:
    for settings_type in settings_types():
        for item in dataclasses.fields(settings_type):
            if isinstance(item.default, (int, float)) and not isinstance(item.default, bool):
                assert not BOUNDS[item.name].problem(item.default), (settings_type, item.name)
