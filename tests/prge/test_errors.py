"""Errors tell what happened and what to do, and several problems at once."""

from __future__ import annotations

import inspect

import pytest

from prge import errors
from prge.errors import BundleError, ConfigError, PrgeError, ProblemsError, RunError, told_as_bundle_error

CLASSES = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == "prge.errors"
]


def test_message_holds_what_happened_and_the_remedy() -> None:
    error = RunError("the disk is full", remedy="free some storage")
    assert str(error) == "the disk is full\n  free some storage"
    assert (error.what, error.remedy) == ("the disk is full", "free some storage")
    assert str(RunError("the disk is full")) == "the disk is full"


def test_problems_are_listed_one_a_line() -> None:
    error = ConfigError(
        "two settings can't be used:", (text for text in ("first", "second")), remedy="see help"
    )
    assert str(error).splitlines() == ["two settings can't be used:", "  - first", "  - second", "  see help"]
    assert error.problems == ["first", "second"]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_one_family_with_exit_code_2(kind: type[PrgeError]) -> None:
    assert issubclass(kind, PrgeError)
    assert kind.exit_code == 2
    error = kind("what", ["a problem"]) if issubclass(kind, ProblemsError) else kind("what")
    assert str(error).startswith("what")


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ValueError("first\nsecond"), "it can't be done: ValueError: first\n  do it otherwise"),
        (KeyError(), "it can't be done: KeyError: it says nothing more\n  do it otherwise"),
    ],
)
def test_what_a_library_raises_is_told_by_its_first_line(raised: Exception, told: str) -> None:
    with pytest.raises(BundleError) as caught, told_as_bundle_error("it can't be done", "do it otherwise"):
        raise raised
    assert str(caught.value) == told
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize("raised", [ConfigError("known already", []), MemoryError(), KeyboardInterrupt()])
def test_what_is_told_elsewhere_is_left_alone(raised: BaseException) -> None:
    with pytest.raises(type(raised)) as caught, told_as_bundle_error("what", "remedy"):
        raise raised
    assert caught.value is raised
