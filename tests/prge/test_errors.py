"""Errors say what happened and what to do, and list several problems at once."""

from __future__ import annotations

import inspect

import pytest

from prge import errors
from prge.errors import (
    ConfigError,
    PrgeError,
    ProblemsError,
    Refusal,
    RunError,
    as_clause,
    format_value,
    printable,
    refused_as,
    shortened,
)

CLASSES = [
    error_class
    for _, error_class in inspect.getmembers(errors, inspect.isclass)
    if error_class.__module__ == "prge.errors"
]


def test_a_message_has_what_happened_and_the_remedy() -> None:
    error = RunError("the disk is full", remedy="free some storage")
    assert str(error) == "the disk is full\n  free some storage"
    assert (error.what, error.remedy) == ("the disk is full", "free some storage")
    assert str(RunError("the disk is full")) == "the disk is full"


def test_problems_are_listed_one_per_line() -> None:
    error = ConfigError(
        "two settings can't be used:", (text for text in ("first", "second")), remedy="see help"
    )
    assert str(error).splitlines() == ["two settings can't be used:", "  - first", "  - second", "  see help"]
    assert error.problems == ["first", "second"]


@pytest.mark.parametrize(
    ("sentence", "clause"),
    [
        ("The disk is full.", "the disk is full"),
        ("These settings can't be used:\n  - first", "these settings can't be used"),
        ("UTF-8 is expected.", "UTF-8 is expected"),
        ("A row is empty", "a row is empty"),
        ("--threads is 0.", "--threads is 0"),
        ("", ""),
    ],
)
def test_a_sentence_becomes_a_clause_of_another_one(sentence: str, clause: str) -> None:
    assert as_clause(sentence) == clause


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda error_class: error_class.__name__)
def test_every_error_is_a_prge_error_with_exit_code_2(error_class: type[PrgeError]) -> None:
    assert issubclass(error_class, PrgeError)
    assert error_class.exit_code == 2
    if issubclass(error_class, Refusal):
        error: PrgeError = error_class("a-code", "what")
    else:
        error = (
            error_class("what", ["a problem"])
            if issubclass(error_class, ProblemsError)
            else error_class("what")
        )
    assert str(error).startswith("what")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("many", "'many'"),
        (["a", 1], "['a', 1]"),
        ("a" * 10**6, "'aaaa"),
        ([0] * 10**6, "[0, 0, 0, 0, 0, 0, ...]"),
        (10**4000, "10000"),
        (10**5000, "a number of thousands of digits"),
        ("\x1b[2J\ud800", "'\\x1b[2J\\ud800'"),
    ],
    ids=["short", "list", "text", "long list", "number", "longer number", "control characters"],
)
def test_a_value_is_shown_shortened(value: object, text: str) -> None:
    assert format_value(value).startswith(text)
    assert len(format_value(value)) <= 100


def test_shortening_leaves_both_ends() -> None:
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghijk", 9) == "abcd...jk"


def test_a_message_has_no_control_characters_and_short_lines() -> None:
    assert str(RunError("\x1b[2Jgone\rX\ud800")) == "\\x1b[2Jgone\\rX\\ud800"
    assert printable("two\nlines") == "two\nlines"
    message = str(ConfigError("a" * 10_000, ["b" * 10_000]))
    assert [len(line) for line in message.splitlines()] == [1000, 1000]


def test_only_the_first_of_many_problems_are_listed() -> None:
    error = ConfigError("settings:", map(str, range(57)))
    assert str(error).splitlines()[-2:] == ["  - 39", "  - ... and 17 more (57 in all)"]
    assert len(error.problems) == 57


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (ValueError("first\nsecond"), "it can't be done: ValueError: first\n  do it otherwise"),
        (KeyError(), "it can't be done: KeyError: KeyError\n  do it otherwise"),
    ],
)
def test_a_librarys_own_exception_becomes_a_refusal_with_its_first_line(
    raised: Exception, message: str
) -> None:
    known = (ValueError, KeyError)
    with (
        pytest.raises(Refusal) as caught,
        refused_as("a-code", "it can't be done", known, remedy="do it otherwise"),
    ):
        raise raised
    assert (caught.value.code, str(caught.value)) == ("a-code", message)
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize(
    "raised", [ConfigError("known already", []), TypeError("a defect"), MemoryError(), KeyboardInterrupt()]
)
def test_every_other_exception_passes(raised: BaseException) -> None:
    with pytest.raises(type(raised)) as caught, refused_as("a-code", "what", ValueError):
        raise raised
    assert caught.value is raised
