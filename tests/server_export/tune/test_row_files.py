"""The files of rows in the folder of a tuning."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from prge.data.readers.files import Row, RowNumber
from server_export.tune.row_files import RowFiles


def test_every_row_is_a_line_and_no_line_is_blank(tmp_path: Path) -> None:
    files = RowFiles(tmp_path / "rows", None)
    rows = [Row(3, {"text": "three"}), Row(78, {"text": "seventy-eight", "day": date(2024, 1, 2)})]
    files.write({"train": rows, "dev": [Row(RowNumber(9, 5, "b.jsonl"), {"text": "five"})], "test": []})
    assert files.train.read_text() == '{"text": "three"}\n{"text": "seventy-eight"}\n'
    assert files.dev is not None and files.dev.read_text() == '{"text": "five"}\n'
    assert files.test is None


def test_rows_that_were_written_before_are_removed(tmp_path: Path) -> None:
    files = RowFiles(tmp_path / "rows", None)
    files.write({"train": [Row(1, {"text": "a"})], "dev": [Row(2, {"text": "b"})]})
    files.write({"train": [Row(1, {"text": "c"})]})
    assert files.dev is None
