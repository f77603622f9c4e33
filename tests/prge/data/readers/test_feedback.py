"""Files of feedback: complete lines, permissions, locks, and removed rows."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prge.data.readers.feedback import (
    AnswerRecord,
    append_feedback,
    check_feedback,
    iter_texts,
    read_feedback,
    remove_rows,
    whole_lines,
    with_leading_space,
)
from prge.data.readers.files import read_rows
from prge.errors import DataError, RunError
from tests.refusals import raises

ANSWERED = AnswerRecord("cmpl-1", "m", "0" * 16, {"prompt": "a"}, " b", {"seed": None})
ROW = ANSWERED.to_feedback("good")


def test_an_incomplete_last_line_is_ignored_and_removed_before_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    append_feedback(path, [ROW, ROW])
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 2):
        path.write_bytes(whole[:-cut])
        left = 2 if cut == 1 else 1  # only the line break is missing
        assert len(read_feedback(path)) == len(read_rows(path)) == left
        append_feedback(path, [ROW])
        assert path.read_bytes() == whole[: len(whole) // 2] * (left + 1)
    path.write_bytes(whole[:10])
    append_feedback(path, [ROW])
    assert path.read_bytes() == whole[: len(whole) // 2]


@pytest.mark.parametrize("content", [b'{"text": "a"}\n{"te', b"", b"\n", b'{"a', b'[1]\n{"a'])
def test_an_incomplete_line_of_other_rows_is_an_error(content: bytes) -> None:
    assert whole_lines(content) == content


OTHERS = {
    "rows": b'{"text": "a"}\n',
    "csv": b"name,born\nAda,1815\n",
    "no line break": b"a text",
    "torn row": b'{"text": "a"}\n{"te',
    "an object": b'{"id": "a"}',
    "binary": bytes(range(256)),
    "blank lines": b"\n\nAda\n",
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS.keys())
def test_a_file_with_other_content_is_refused_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "people.csv"
    path.write_bytes(content)
    path.chmod(0o644)
    with raises(DataError, "feedback-foreign", containing=str(path)):
        check_feedback(path)
    assert path.read_bytes() == content and path.stat().st_mode & 0o777 == 0o644


def test_checking_a_file_of_feedback_does_not_change_it(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    check_feedback(path)
    assert not path.exists()
    append_feedback(path, [ROW])
    whole = path.read_bytes()
    for content in (b"", b"\n", whole, whole[:10], whole[:-1], whole + whole[:10], whole + b"broken"):
        path.write_bytes(content)
        path.chmod(0o644)
        check_feedback(path)
        assert path.read_bytes() == content and path.stat().st_mode & 0o777 == 0o644


def test_other_types_of_files_accept_no_feedback(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    append_feedback(path, [ROW])
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "link", tmp_path / "pipe", tmp_path / "none" / "feedback.jsonl"):
        with raises(RunError, "write-failed", containing=str(other)):
            check_feedback(other)


def test_a_text_that_is_no_feedback_keeps_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"a text")
    append_feedback(path, [ROW])
    assert path.read_bytes().startswith(b"a text\n{")


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    before = os.umask(0)
    try:
        append_feedback(path, [ROW])
        assert path.stat().st_mode & 0o777 == 0o600
        remove_rows(path, lambda number, fields, line: True)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_bytes() == b""
    path.chmod(0o644)
    append_feedback(path, [ROW])
    assert path.stat().st_mode & 0o777 == 0o600


def test_rows_that_are_appended_during_a_removal_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    bad = ANSWERED.to_feedback("bad")

    def is_bad(number: int, fields: Any, line: str) -> bool:
        return fields["rating"] == "bad"

    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            pool.submit(append_feedback, path, [ROW, bad])
            pool.submit(remove_rows, path, is_bad)
    remove_rows(path, is_bad)
    assert [row["rating"] for row in read_feedback(path)] == ["good"] * 50


def test_rows_are_matched_before_the_file_is_locked(tmp_path: Path) -> None:
    """Appending doesn't wait for the check, and a row that is appended during the check is checked too."""
    path = tmp_path / "feedback.jsonl"
    append_feedback(path, [ROW] * 3)
    numbers = []

    def give_up() -> None:
        raise AssertionError("the file is locked")

    def is_meant(number: int, fields: Any, line: str) -> bool:
        if len(numbers) < 3:
            append_feedback(path, [{**ROW, "id": f"new {number}"}], give_up)
        numbers.append(number)
        return number in (2, 4)

    assert remove_rows(path, is_meant) == 2
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert [row["id"] for row in read_feedback(path)] == ["cmpl-1", "cmpl-1", "new 2", "new 3"]


def test_a_file_that_is_replaced_meanwhile_is_checked_again(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    append_feedback(path, [{**ROW, "id": str(number)} for number in range(4)])
    calls = 0

    def is_meant(number: int, fields: Any, line: str) -> bool:
        nonlocal calls
        calls += 1
        if calls == 1:
            assert remove_rows(path, lambda number, fields, line: number == 1) == 1
        return fields["id"] == "2"

    assert remove_rows(path, is_meant) == 1
    assert [row["id"] for row in read_feedback(path)] == ["1", "3"]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for path in (tmp_path, tmp_path / "link", tmp_path / "none" / "feedback.jsonl"):
        with raises(RunError, "write-failed", containing=str(path)):
            append_feedback(path, [ROW])
    assert not (tmp_path / "target").exists()


def test_lines_that_are_no_json_are_removed_by_their_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "A"}\nbroken\n\n{"messages": [{"content": "a"}]}\n')
    numbers = []

    def meant(number: int, fields: object, line: str) -> bool:
        numbers.append(number)
        return "a" in "".join(iter_texts(fields) if fields else [line])

    assert remove_rows(path, meant) == 1
    assert numbers == [1, 2, 4] and path.read_text() == '{"text": "A"}\nbroken\n\n'


def test_a_correction_of_a_continued_text_keeps_its_space() -> None:
    assert (
        with_leading_space("c", " b") == " c"
        and with_leading_space("\nc", " b") == "\nc"
        and with_leading_space("c", "b") == "c"
    )


def test_a_row_has_all_fields(tmp_path: Path) -> None:
    row = json.loads(json.dumps(ANSWERED.to_feedback(correction=" c")))
    assert row.pop("time").endswith("+00:00")
    assert row == {
        "id": "cmpl-1", "model": "m", "adapter": "0" * 16, "settings": {"seed": None}, "prompt": "a",
        "answer": " b", "correction": " c",
    }  # fmt: skip
