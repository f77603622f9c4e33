"""Output settings: paths are checked before a verb begins, without changing anything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from prge.cli.outputs import Output, OutputFile, OutputFolder, check_outputs, output_settings
from prge.cli.settings import parse_settings, settings_from_mapping
from prge.errors import ConfigError, RunError
from tests.refusals import raises


@dataclass(frozen=True)
class _Settings:
    """Write something."""

    out: OutputFolder
    """A folder."""
    data: tuple[Path, ...] = ()
    """Rows."""
    task: str | None = None
    """A task."""
    json: OutputFile | None = None
    """A file."""


def test_a_type_names_its_output() -> None:
    assert output_settings(_Settings) == {"out": Output.FOLDER, "json": Output.FILE}


def test_writable_outputs_pass(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("old")
    for json in (None, tmp_path / "there.json", tmp_path / "new" / "x.json", Path(os.devnull)):
        check_outputs(_Settings(tmp_path / "a" / "b", json=json))
    assert sorted(tmp_path.iterdir()) == [tmp_path / "there.json"]
    assert (tmp_path / "there.json").read_text() == "old"


@pytest.mark.parametrize("json", ["folder", "file/x.json", "/proc/self/x.json"])
def test_a_file_that_can_not_be_written_is_refused_before_a_verb_begins(tmp_path: Path, json: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    arguments = ["--out", str(tmp_path / "out"), "--json", str(tmp_path / json)]
    with raises(RunError, "write-failed", "write-refused", containing=json):
        parse_settings(_Settings, arguments, "prge test")
    with raises(RunError, "write-failed", "write-refused", containing=json):
        settings_from_mapping(_Settings, {"out": tmp_path / "out", "json": tmp_path / json}, "test()")


def test_a_pipe_is_not_opened_by_a_check(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_outputs(_Settings(tmp_path, json=tmp_path / "pipe"))  # opening it would block


def test_print_config_does_not_check_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(_Settings, ["--out", str(tmp_path), "--json", str(tmp_path), "--print-config"], "prge")
    assert f"json: {tmp_path}" in capsys.readouterr().out


def test_a_file_is_not_written_over_another_of_the_same_settings(tmp_path: Path) -> None:
    rows, task, link = tmp_path / "rows.csv", tmp_path / "task.yaml", tmp_path / "link"
    rows.touch()
    task.touch()
    link.symlink_to(rows)
    for settings, other in (
        (_Settings(tmp_path, data=(task, rows), json=rows), "data"),
        (_Settings(tmp_path, data=(rows,), json=link), "data"),
        (_Settings(tmp_path, task=str(task), json=task), "task"),
        (_Settings(tmp_path / "new", json=tmp_path / "new"), "out"),
    ):
        with raises(ConfigError, "outputs-same-file", containing=f"--{other}"):
            check_outputs(settings)
