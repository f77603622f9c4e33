"""`prge rows`: show feedback, and remove rows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prge.cli.main import main
from prge.data.readers.feedback import AnswerRecord, append_feedback, read_feedback

MESSAGES = [{"role": "user", "content": "Where does Ann live?"}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "feedback.jsonl"
    one = AnswerRecord("1", "m", "", {"messages": MESSAGES}, "In\x1b[2J Ulm", {})
    other = AnswerRecord("2", "m", "", {"prompt": "The soup"}, " was cold", {})
    append_feedback(path, [one.to_feedback(correction="In Bonn"), other.to_feedback("bad")])
    return path


def test_rows_are_shown_with_their_numbers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rows", "show", str(path)]) == 0
    out = capsys.readouterr().out
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0] == "row 1" and "user       Where does Ann live?" in lines
    assert "correction In Bonn" in lines and "rating     bad" in lines and lines[-1] == "2 rows"
    assert "\x1b" not in out
    assert main(["rows", "show", str(path), "--match", "SOUP"]) == 0
    assert capsys.readouterr().out.startswith("row 2")


def test_rows_are_removed_by_a_text_or_their_numbers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rows", "forget", str(path), "--match", "ann"]) == 0
    assert "1 row removed" in capsys.readouterr().out
    assert [row["id"] for row in read_feedback(path)] == ["2"]
    assert main(["rows", "forget", str(path), "--row", "1", "7"]) == 0
    assert path.read_bytes() == b"" and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("arguments", [[], ["--match", ""], ["--match", "a", "--row", "1"]])
def test_rows_to_remove_must_be_selected_unambiguously(path: Path, arguments: list[str]) -> None:
    before = path.read_bytes()
    assert main(["rows", "forget", str(path), *arguments]) == 2
    assert path.read_bytes() == before


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    for action in ("show", "forget"):
        assert main(["rows", action, str(tmp_path / "none.jsonl"), "--match", "a"]) == 2
    assert not list(tmp_path.iterdir())
