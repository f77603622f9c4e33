"""The rows of a tuning as its folder has them."""

from __future__ import annotations

import json
from pathlib import Path

from prge.rows.readers import Row, read_rows
from server_export.tune.row_files import RowFiles


def test_a_row_lies_on_the_line_that_it_has_in_the_users_file(tmp_path: Path) -> None:
    """So that whatever is told of a row later on names a line that the user knows."""
    files = RowFiles(tmp_path / "rows", None)
    rows = [Row(3, {"text": "three"}), Row(78, {"text": "seventy-eight"})]
    files.write({"train": rows, "dev": [Row(5, {"text": "five"})], "test": []})
    assert read_rows(files.train) == rows
    assert json.loads(files.train.read_text().splitlines()[77])["text"] == "seventy-eight"
    assert files.dev is not None and [row.number for row in read_rows(files.dev)] == [5]
    assert files.test is None


def test_what_was_written_before_is_gone(tmp_path: Path) -> None:
    files = RowFiles(tmp_path / "rows", None)
    files.write({"train": [Row(1, {"text": "a"})], "dev": [Row(2, {"text": "b"})]})
    files.write({"train": [Row(1, {"text": "c"})]})
    assert files.dev is None
