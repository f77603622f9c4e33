"""The rows of a tuning: which files and columns they come from, and how they are split."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from prge.errors import DataError
from server_export.tune.row_files import RowFiles
from server_export.tune.settings import TuneSettings


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path | None) -> list[Any]:
    assert path is not None
    return [json.loads(line) for line in path.read_text().splitlines()]


def tune(data: Path, **given: Any) -> TuneSettings:
    return TuneSettings(data=data, out=Path("out"), model="model", **given)


def test_a_folder_has_development_and_test_rows_too(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        write(tmp_path / "mlx" / f"{name}.jsonl", {"text": name})
    files = RowFiles(tmp_path / "rows", None)
    notes = files.write(tune(tmp_path / "mlx"))
    assert [read(path) for path in (files.train, files.dev, files.test)] == [
        [{"text": "train"}],
        [{"text": "valid"}],
        [{"text": "test"}],
    ]
    assert any(note.startswith("dev: 1 rows from ") for note in notes)


def test_only_the_columns_of_the_form_are_kept(tmp_path: Path) -> None:
    """So that whoever reads the written rows takes them for the form that the user chose."""
    rows = [{"story": f"text {n % 20}", "prompt": "p", "completion": "c", "id": n} for n in range(40)]
    files = RowFiles(tmp_path / "rows", None)
    files.write(tune(write(tmp_path / "a.jsonl", *rows), columns=("text=story",)))
    train, dev = read(files.train), read(files.dev)
    assert len(train) + len(dev) == 40 and dev
    assert all(row.keys() == {"text"} for row in [*train, *dev])
    assert not {row["text"] for row in train} & {row["text"] for row in dev}


def test_rows_of_no_form_are_told_before_anything_is_exported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "a"})
    with pytest.raises(DataError, match="its columns are question"):
        RowFiles(tmp_path / "rows", None).write(tune(path))


def test_the_name_of_a_data_set_is_no_path() -> None:
    assert tune(Path("nyu-mll/glue:sst2")).resolved().data == Path("nyu-mll/glue:sst2")
