"""Verbs of a verb: the first word names one, and all are listed without a word."""

from __future__ import annotations

import pytest

from prge.errors import PrgeError
from prge.verbs.subverbs import Action, run_action
from tests.refusals import raises

SEEN: list[list[str]] = []
ACTIONS = {
    "push": Action("bring things", lambda words: len(SEEN.append(words) or words)),
    "pull": Action("get things", lambda words: 0),
}


def test_the_first_word_names_an_action_and_the_others_are_its() -> None:
    assert run_action(["push", "a", "b"], ACTIONS, "prge phone", "") == 2
    assert SEEN == [["a", "b"]]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_all_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_action(words, ACTIONS, "prge phone", "About phones.") == 0
    told = capsys.readouterr().out
    assert "usage: prge phone <verb> [flags]" in told and "About phones." in told
    assert "  push  bring things" in told


def test_another_word_is_an_error_with_the_nearest() -> None:
    with raises(PrgeError, "verb-unknown", saying="`prge phone push`"):
        run_action(["psh"], ACTIONS, "prge phone", "")


def test_an_action_may_be_refused_before_it_runs() -> None:
    def check(name: str) -> None:
        raise PrgeError(f"no {name} here", code="action-refused")

    with raises(PrgeError, "action-refused"):
        run_action(["pull"], ACTIONS, "prge phone", "", check)
