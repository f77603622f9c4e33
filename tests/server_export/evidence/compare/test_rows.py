"""The rows of a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prge.errors import DataError, RunError
from server_export.evidence.compare.rows import write_splits
from tests.comparisons import settings_for
from tests.refusals import raises


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "texts.json").write_text(json.dumps([f"text {number}" for number in range(10)]))
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(10))
    )
    return folder


def split_arguments(data: Path, name: str) -> list[object]:
    return ["--task", "null", "--data", data, "--train", name, "--dev", name, "--test", name]


def test_parts_of_one_file(data: Path, tmp_path: Path) -> None:
    limits = ["--train-limit", 5, "--dev-start", 5, "--dev-limit", 2, "--test-start", 7]
    settings = settings_for(tmp_path / "out", *split_arguments(data, "texts.json"), *limits)
    written = write_splits(settings, tmp_path / "written")
    result = {split: path.read_text().splitlines() for split, path in written.items()}
    assert [len(result[split]) for split in ("train", "dev", "test")] == [5, 2, 3]
    assert json.loads(result["test"][0]) == {"text": "text 7"}
    assert write_splits(settings, tmp_path / "written") == written


def test_splits_that_share_rows_are_refused(data: Path, tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "out", *split_arguments(data, "rows.jsonl"), "--dev-start", 8)
    with raises(DataError, "splits-share-rows", containing="train and dev"):
        write_splits(settings, tmp_path / "written")


def test_rows_that_changed_are_refused(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "out", "--dev-limit", 4)
    write_splits(settings, tmp_path / "written")
    (tmp_path / "written/dev.jsonl").write_text("{}\n")
    with raises(RunError, "rows-changed", containing="dev.jsonl"):
        write_splits(settings, tmp_path / "written")


def test_files_of_a_folder_are_selected_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "mlx"
    folder.mkdir()
    for name in ("train", "valid", "test"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"review": name}) + "\n")
    arguments = ("--task", "null", "--data", folder, "--columns", "text=review")
    settings = settings_for(tmp_path / "out", *arguments)
    written = write_splits(settings, tmp_path / "written")
    result = {part: json.loads(path.read_text()) for part, path in written.items()}
    assert result == {"train": {"text": "train"}, "dev": {"text": "valid"}, "test": {"text": "test"}}
    (folder / "dev.csv").touch()
    with raises(DataError, "part-missing", containing="valid.jsonl, dev.csv"):
        write_splits(settings, tmp_path / "again")
