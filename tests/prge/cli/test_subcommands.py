"""Subcommands: the first word selects one, and without a word all are listed."""

from __future__ import annotations

import pytest

from prge.cli.subcommands import Action, run_action
from prge.errors import PrgeError
from tests.refusals import raises

SEEN: list[list[str]] = []
ACTIONS = {
    "push": Action("bring things", lambda arguments: len(SEEN.append(arguments) or arguments)),
    "pull": Action("get things", lambda arguments: 0),
}


def test_the_first_word_names_an_action_which_gets_the_others() -> None:
    assert run_action(["push", "a", "b"], ACTIONS, "prge phone", "") == 2
    assert SEEN == [["a", "b"]]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_all_subcommands_are_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_action(arguments, ACTIONS, "prge phone", "About phones.") == 0
    message = capsys.readouterr().out
    assert "usage: prge phone <verb> [flags]" in message and "About phones." in message
    assert "  push  bring things" in message


def test_groups_have_headings(capsys: pytest.CaptureFixture[str]) -> None:
    actions = {
        "push": Action("bring things", lambda arguments: 0, "phone"),
        "pull": Action("get things", lambda arguments: 0, "phone"),
        "doctor": Action("check things", lambda arguments: 0, "inspect"),
    }
    assert run_action([], actions, "prge", "About.") == 0
    assert (
        "About.\n\nphone:\n  push    bring things\n  pull    get things\n\ninspect:\n  doctor  check things\n"
        in capsys.readouterr().out
    )


def test_an_unknown_word_is_an_error_that_names_the_nearest() -> None:
    with raises(PrgeError, "verb-unknown", containing="`prge phone push`"):
        run_action(["psh"], ACTIONS, "prge phone", "")


def test_an_action_may_be_refused_before_it_runs() -> None:
    def check(name: str) -> None:
        raise PrgeError(f"no {name} here", code="action-refused")

    with raises(PrgeError, "action-refused"):
        run_action(["pull"], ACTIONS, "prge phone", "", check)
