"""Conversion of feedback to rows for training, and its summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prge.data.forms.form import find_form
from prge.data.readers.feedback import AnswerRecord, append_feedback
from prge.data.sources import read_source
from prge.errors import DataError
from tests.refusals import raises

TEXT = AnswerRecord("1", "m", "", {"prompt": "It was"}, " great", {})
MESSAGES = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
CHAT = AnswerRecord("2", "m", "", {"messages": MESSAGES}, "d", {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "feedback.jsonl"


def converted(path: Path, *rows: Any, objective: Any = "auto") -> tuple[list[dict[str, Any]], str]:
    path.unlink(missing_ok=True)
    append_feedback(path, rows)
    source = read_source(path, objective=objective)
    assert find_form(source.rows, source.name, objective=objective)
    return [dict(row.fields) for row in source.rows], source.feedback_summary


def test_corrections_become_completions_or_pairs(path: Path) -> None:
    rows = TEXT.to_feedback(correction="bad"), TEXT.to_feedback("good")
    result, summary = converted(path, *rows)
    assert result == [
        {"prompt": "It was", "completion": " bad", "control_tokens": "prompt"},
        {"prompt": "It was", "completion": " great", "control_tokens": "prompt"},
    ]
    assert summary == "feedback: 1 corrections, 1 good, 0 bad; completions"
    result, summary = converted(path, *rows, objective="dpo")
    pair = {"prompt": "It was", "chosen": " bad", "rejected": " great"}
    assert result == [{**pair, "control_tokens": "prompt"}]
    assert summary.endswith("pairs, 1 ratings left out")


def test_one_bad_rating_makes_all_rows_rated_answers(path: Path) -> None:
    rows = TEXT.to_feedback(correction="bad"), TEXT.to_feedback("good"), TEXT.to_feedback("bad")
    result, summary = converted(path, *rows)
    assert [(row["completion"], row["label"]) for row in result] == [
        (" bad", True), (" great", False), (" great", True), (" great", False)
    ]  # fmt: skip
    assert summary == "feedback: 1 corrections, 1 good, 1 bad; rated answers"
    assert [row.number for row in read_source(path, objective="auto").rows] == [1, 2, 3, 4]
    # Verbs without preferences never train on disliked answers.
    assert [row.fields["completion"] for row in read_source(path).rows] == [" bad", " great"]
    result, summary = converted(path, *rows, objective="completion")
    assert len(result) == 2 and summary.endswith("completions, bad ratings left out")
    assert converted(path, rows[0], objective="kto")[0] == converted(path, *rows)[0][:2]


def test_only_the_last_answer_of_a_conversation_is_trained_on(path: Path) -> None:
    (row,), _ = converted(path, CHAT.to_feedback(correction="e"))
    weights = [(message["content"], message.get("weight", 1)) for message in row["messages"]]
    assert weights == [("a", 1), ("b", 0), ("c", 1), ("e", 1)]
    (row,), _ = converted(path, CHAT.to_feedback(correction="e"), objective="ipo")
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
def test_invalid_manual_changes_of_rows_are_refused(
    path: Path, change: dict[str, Any], code: str, value: str
) -> None:
    row = {**TEXT.to_feedback(correction="bad"), **change}
    path.write_text(json.dumps(TEXT.to_feedback("good")) + "\n" + json.dumps(row) + "\n")
    with raises(DataError, code, containing="row 2"):
        read_source(path)
    broken: list[str] = []
    assert len(read_source(path, broken=broken).rows) == 1 and value in broken[0]


def test_unknown_ratings_and_other_rows_are_refused(path: Path) -> None:
    path.write_text(json.dumps({**TEXT.to_feedback("good"), "rating": 5}) + "\n")
    with raises(DataError, "feedback-unsound", containing="5"):
        read_source(path)
    append_feedback(path, [TEXT.to_feedback("good")])
    with path.open("a") as stream:
        stream.write('{"text": "a"}\n')
    with raises(DataError, "forms-mixed"):
        read_source(path)
    with raises(DataError, "rows-empty"):
        converted(path, TEXT.to_feedback("bad"), objective="completion")
