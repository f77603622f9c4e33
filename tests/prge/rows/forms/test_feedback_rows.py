"""Feedback as rows to learn from: what corrections and ratings become, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prge.errors import DataError
from prge.rows.forms.form import find_form
from prge.rows.readers.feedback import Answered, append_feedback
from prge.rows.sources import read_source
from tests.refusals import raises

TEXT = Answered("1", "m", "", {"prompt": "It was"}, " great", {})
MESSAGES = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
CHAT = Answered("2", "m", "", {"messages": MESSAGES}, "d", {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "feedback.jsonl"


def made(path: Path, *rows: Any, objective: Any = "auto") -> tuple[list[dict[str, Any]], str]:
    path.unlink(missing_ok=True)
    append_feedback(path, rows)
    source = read_source(path, objective=objective)
    assert find_form(source.rows, source.name, objective=objective)
    return [dict(row.fields) for row in source.rows], source.told


def test_corrections_become_completions_or_pairs(path: Path) -> None:
    rows = TEXT.judged(correction="bad"), TEXT.judged("good")
    found, told = made(path, *rows)
    assert found == [
        {"prompt": "It was", "completion": " bad", "control_tokens": "prompt"},
        {"prompt": "It was", "completion": " great", "control_tokens": "prompt"},
    ]
    assert told == "feedback: 1 corrections, 1 good, 0 bad; completions"
    found, told = made(path, *rows, objective="dpo")
    pair = {"prompt": "It was", "chosen": " bad", "rejected": " great"}
    assert found == [{**pair, "control_tokens": "prompt"}]
    assert told.endswith("pairs, 1 ratings left out")


def test_a_bad_rating_makes_all_of_them_rated_answers(path: Path) -> None:
    rows = TEXT.judged(correction="bad"), TEXT.judged("good"), TEXT.judged("bad")
    found, told = made(path, *rows)
    assert [(row["completion"], row["label"]) for row in found] == [
        (" bad", True), (" great", False), (" great", True), (" great", False)
    ]  # fmt: skip
    assert told == "feedback: 1 corrections, 1 good, 1 bad; rated answers"
    assert [row.number for row in read_source(path, objective="auto").rows] == [1, 2, 3, 4]
    # Verbs that know no preferences never learn what was disliked.
    assert [row.fields["completion"] for row in read_source(path).rows] == [" bad", " great"]
    found, told = made(path, *rows, objective="completion")
    assert len(found) == 2 and told.endswith("completions, bad ratings left out")
    assert made(path, rows[0], objective="kto")[0] == made(path, *rows)[0][:2]


def test_of_a_conversation_the_last_answer_is_learnt_alone(path: Path) -> None:
    (row,), _ = made(path, CHAT.judged(correction="e"))
    weights = [(message["content"], message.get("weight", 1)) for message in row["messages"]]
    assert weights == [("a", 1), ("b", 0), ("c", 1), ("e", 1)]
    (row,), _ = made(path, CHAT.judged(correction="e"), objective="ipo")
    assert row["prompt"] == MESSAGES and row["rejected"] == [{"role": "assistant", "content": "d"}]


@pytest.mark.parametrize(
    ("change", "code", "value"),
    [
        ({"answer": 5}, "feedback-unsound", "5"),
        ({"correction": " "}, "feedback-unsound", "' '"),
        ({"prompt": ["a"]}, "feedback-unsound", "prompt"),
        ({"messages": [{"role": "user"}]}, "feedback-unsound", "messages"),
        ({"messages": "a"}, "rows-unreadable", "'a'"),
    ],
)
def test_rows_that_were_changed_by_hand(path: Path, change: dict[str, Any], code: str, value: str) -> None:
    row = {**TEXT.judged(correction="bad"), **change}
    path.write_text(json.dumps(TEXT.judged("good")) + "\n" + json.dumps(row) + "\n")
    with raises(DataError, code, saying="row 2"):
        read_source(path)
    broken: list[str] = []
    assert len(read_source(path, broken=broken).rows) == 1 and value in broken[0]


def test_an_unknown_rating_and_other_rows(path: Path) -> None:
    path.write_text(json.dumps({**TEXT.judged("good"), "rating": 5}) + "\n")
    with raises(DataError, "feedback-unsound", saying="5"):
        read_source(path)
    append_feedback(path, [TEXT.judged("good")])
    with path.open("a") as stream:
        stream.write('{"text": "a"}\n')
    with raises(DataError, "forms-mixed"):
        read_source(path)
    with raises(DataError, "rows-empty"):
        made(path, TEXT.judged("bad"), objective="completion")
