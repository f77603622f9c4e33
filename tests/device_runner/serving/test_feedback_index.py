"""Tests of the index of a feedback file that grows, loses rows and is written by others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from device_runner.serving.feedback_index import ChangedError, FeedbackIndex, IndexEntry
from prge.data.readers.feedback import AnswerRecord, append_feedback, feedback_key, read_feedback, remove_rows


def rows(*numbers: int) -> list[Any]:
    """Return rows for these numbers; equal numbers give equal rows."""
    return [
        {
            **AnswerRecord(str(number), "m", "", {"prompt": f"q{number % 3}"}, f" a{number}", {}).to_feedback(
                "good" if number % 2 else "bad"
            ),
            "time": "2026-01-01T00:00:00+00:00",
        }
        for number in numbers
    ]


def read(index: FeedbackIndex) -> list[IndexEntry]:
    while index.read_on():
        pass
    return [index[number] for number in range(len(index))]


def test_the_index_has_the_valid_rows_in_order(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    index = FeedbackIndex(path)
    assert read(index) == []
    append_feedback(path, rows(*range(5)))
    with path.open("ab") as stream:
        stream.write(b'broken\n\n{"text": "a"}\n' + b'{"prompt": "a", "answer": 5, "rating": "good"}\n')
    append_feedback(path, rows(0, 5))
    entries = read(index)
    kept = read_feedback(path)
    assert len(kept) == 7  # one of them is duplicated
    assert [entry.key for entry in entries] == list(dict.fromkeys(map(feedback_key, kept)))
    assert [entry.is_learnable for entry in entries] == [False, True] * 3
    questions = [entry.question for entry in entries]
    assert questions[:3] == questions[3:] and len(set(questions)) == 3
    keys = [entries[4].key, entries[1].key]
    assert index.rows(keys) == [kept[4], kept[1]] and index.entries([*keys, "none"]) == [
        entries[4],
        entries[1],
    ]


def test_bad_answers_can_be_learnt_from_as_ratings(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    append_feedback(path, rows(0, 1))
    for learns_ratings in (False, True):
        index = FeedbackIndex(path, learns_ratings)
        assert [entry.is_learnable for entry in read(index)] == [learns_ratings, True]


def test_rows_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "feedback.jsonl"
    append_feedback(path, rows(*range(1000)))
    index = FeedbackIndex(path)
    assert len(read(index)) == 1000
    count, pread = 0, os.pread

    def counted(*given: int) -> bytes:
        nonlocal count
        content = pread(*given)
        count += len(content)
        return content

    monkeypatch.setattr(os, "pread", counted)
    before = path.stat().st_size
    append_feedback(path, rows(1000))
    count = 0
    assert len(read(index)) == 1001
    assert count == path.stat().st_size - before


def test_an_incomplete_last_line_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    lines = [json.dumps(row).encode() + b"\n" for row in rows(0, 1)]
    index = FeedbackIndex(path)
    for end in range(1, len(lines[1])):
        path.write_bytes(lines[0] + lines[1][:end])
        assert len(read(index)) == 1 + (end == len(lines[1]) - 1)  # only its line break is missing
        index = FeedbackIndex(path) if end % 2 else index
    append_feedback(path, rows(2))
    assert len(read(index)) == 3


def test_deleted_rows_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    append_feedback(path, rows(*range(6)))
    index = FeedbackIndex(path)
    first, second, *_ = read(index)
    for _ in range(3):  # inode numbers are reused
        remove_rows(path, lambda number, fields, line: number == 1)
        with pytest.raises(ChangedError):
            index.rows([second.key])
        assert not index.has_all([first.key])
        read(index)
    assert len(index) == 3 and index.generation == 4
    append_feedback(path, rows(0))
    assert [entry.key for entry in read(index)][-1] == first.key
    path.unlink()
    assert read(index) == []


def test_a_file_that_another_program_edits_gives_no_wrong_row(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    append_feedback(path, rows(1, 3, 5))
    index = FeedbackIndex(path)
    keys = [entry.key for entry in read(index)]
    with path.open("r+b") as stream:
        stream.write(path.read_bytes().replace(b" a3", b" b3"))
    assert not index.has_all([keys[1]])
    assert [entry.key for entry in read(index)] == [keys[0], feedback_key(read_feedback(path)[1]), keys[2]]


def test_an_endless_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    with path.open("wb") as stream:
        stream.truncate(40 << 20)
        stream.seek(0, 2)
        stream.write(b"\n")
    append_feedback(path, rows(1))
    assert len(read(FeedbackIndex(path))) == 1
