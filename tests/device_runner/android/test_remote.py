"""A verb on a phone: its inputs are sent, its output files are copied back, and no files stay."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from device_runner.android.command import REMOTE
from device_runner.android.remote import RemoteVerb
from prge.cli.inputs import Input, InputFile, TestRows, input_settings
from prge.cli.outputs import Output, OutputFile, output_settings
from tests.device_runner.android.fake_adb import FakePhone
from tests.verbs import prge
from tests.workshop import write_rows

# A script instead of Python, which writes a given text to the file that a setting names.
WRITES = """#!/bin/sh
exec {python} - "$5" <<'END'
import pathlib, sys, yaml
settings = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
path = pathlib.Path(settings[{name!r}])
print(path.read_text() if path.is_file() else "nothing is there", end="")
{here}
with path.open("a") as stream:
    stream.write({text!r})
sys.exit({code})
END
"""


@pytest.fixture
def phone(tmp_path: Path) -> FakePhone:
    return FakePhone(tmp_path / "fake")


def writes(phone: FakePhone, name: str, text: str, code: int = 0, here: str = "") -> None:
    """Make the verb on the phone write a text, and run the Python code `here` before that."""
    script = WRITES.format(python=sys.executable, name=name, text=text, code=code, here=here)
    (phone.folder / "runtime" / "run.sh").write_text(script)


def figures(output: str) -> list[str]:
    """Return the lines of a score, without the line that names the file of rows."""
    first, *rest = output.splitlines()
    assert "dev.jsonl (task letters)" in first and len(rest) > 4
    return rest


def left(phone: FakePhone) -> list[str]:
    """Return the names in the phone's folder of temporary files."""
    return [path.name for path in (phone.folder / "tmp").glob("*")]


def test_scores_on_the_phone_equal_scores_here(phone: FakePhone, workshop: Path, tmp_path: Path) -> None:
    arguments = [
        "--bundle",
        workshop / "bundle",
        "--data",
        workshop / "dev.jsonl",
        "--task",
        workshop / "task.yaml",
    ]
    here = prge(
        "eval", *arguments, "--json", tmp_path / "here.json", "--predictions", tmp_path / "here.jsonl"
    )
    outputs = ["--json", tmp_path / "new" / "there.json", "--predictions", tmp_path / "there.jsonl"]
    assert figures(phone.prge("eval", *arguments, *outputs).stdout) == figures(here.stdout)
    for name in ("json", "jsonl"):
        folder = tmp_path / ("new" if name == "json" else "")
        assert (folder / f"there.{name}").read_bytes() == (tmp_path / f"here.{name}").read_bytes()
    assert not left(phone)


def test_the_name_of_a_run_on_the_phone_stands_for_its_bundle_and_adapter(
    phone: FakePhone, workshop: Path
) -> None:
    run = phone.write_settings("first", workshop / "bundle")
    (run / "final").symlink_to(workshop / "bundle" / "adapter")
    arguments = ["--data", workshop / "dev.jsonl", "--task", workshop / "task.yaml"]
    there = phone.prge("eval", "first", *arguments).stdout
    assert figures(there) == figures(prge("eval", workshop / "bundle", *arguments).stdout)
    assert not (phone.folder / "bundles").exists()


def test_a_bare_name_is_a_run_on_the_phone_even_if_a_local_folder_has_it(
    phone: FakePhone, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phone.write_settings("first", "/data/bundle")
    shutil.copytree(workshop / "bundle" / "adapter", tmp_path / "here" / "first")
    monkeypatch.chdir(tmp_path / "here")
    (phone.folder / "runtime" / "run.sh").write_text('#!/bin/sh\ncat "$5"\n')

    def adapter_of(*arguments: object) -> str:
        output = phone.prge("eval", *arguments, "--data", workshop / "dev.jsonl").stdout
        return str(yaml.safe_load(output)["adapter"])

    there = f"{phone.folder}/runs/first"
    assert adapter_of("first") == adapter_of(workshop / "bundle", "--adapter", "first") == there
    sent = adapter_of(workshop / "bundle", "--adapter", tmp_path / "here" / "first")
    assert sent.startswith(f"{phone.folder}/adapters/") and Path(sent, "adapter_config.json").is_file()
    output = phone.prge("eval", workshop / "bundle", "x/y", "--data", workshop / "dev.jsonl", code=2).stderr
    assert "--adapter x/y: there is no such folder, and no run of that name on fake" in output


def test_rows_of_the_device_stay_there_and_its_errors_are_shown(
    phone: FakePhone, workshop: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"other": "a"}])
    arguments = [
        "--bundle",
        workshop / "bundle",
        "--data",
        rows,
        "--data-on-device",
        "--json",
        tmp_path / "x.json",
    ]
    output = phone.prge("eval", *arguments, code=2).stderr
    assert "prge eval: error: " in output and str(rows) in output
    assert not (phone.folder / "data").exists() and not (tmp_path / "x.json").exists() and not left(phone)
    absent = phone.prge("eval", "--bundle", workshop / "bundle", "--data", "rows", "--data-on-device", code=2)
    assert "--data: fake has no readable rows" in absent.stderr


def test_files_are_copied_back_however_the_verb_ends(phone: FakePhone, tmp_path: Path) -> None:
    phone.write_settings("first", "/data/bundle")
    writes(phone, "feedback", "one\n", code=3)
    phone.prge("chat", "first", "--feedback", tmp_path / "mine.jsonl", code=3)
    assert (tmp_path / "mine.jsonl").read_text() == "one\n" and not left(phone)


def test_a_file_that_the_verb_appends_to_is_sent(phone: FakePhone, tmp_path: Path) -> None:
    phone.write_settings("first", "/data/bundle")
    local_rows = tmp_path / "mine.jsonl"
    local_rows.write_text("one\n")
    local_rows.chmod(0o640)
    writes(phone, "feedback", "two\n")
    assert phone.prge("chat", "first", "--feedback", local_rows).stdout == "one\n"
    assert local_rows.read_text() == "one\ntwo\n" and local_rows.stat().st_mode & 0o777 == 0o640
    # Lines that were appended here meanwhile stay.
    writes(phone, "feedback", "four\n", here=f"open({str(local_rows)!r}, 'a').write('three\\n')")
    phone.prge("chat", "first", "--feedback", local_rows)
    assert local_rows.read_text() == "one\ntwo\nthree\nfour\n"


@dataclass(frozen=True)
class _Settings:
    """Count something."""

    data: TestRows
    """Rows."""
    notes: InputFile | None = None
    """A file."""
    json: OutputFile | None = None
    """A file to write."""
    many: int = 1
    """A number."""


def test_a_verb_on_a_phone_is_its_settings_class_and_a_line(
    phone: FakePhone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"PRGE_ADB": phone.adb, "ANDROID_SERIAL": "fake"}.items():
        monkeypatch.setenv(name, str(value))
    verb = RemoteVerb("count", _Settings, "count rows on a phone", "--data rows.jsonl")
    notes, rows = tmp_path / "notes.txt", write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    notes.write_text("mine")
    (phone.folder / "runtime" / "run.sh").write_text('#!/bin/sh\necho "$3" >&2\ncat "$5"\nexit 4\n')
    arguments = ["--data", rows, "--notes", notes, "--json", tmp_path / "x.json", "--many", 2]
    assert verb.main([*map(str, arguments), "--folder", str(phone.folder)]) == 4
    out, errors = capfd.readouterr()
    settings: dict[str, Any] = yaml.safe_load(out)
    assert errors == "count\n" and settings["many"] == 2
    assert Path(settings["data"]).read_bytes() == rows.read_bytes()
    assert Path(settings["notes"]).read_text() == "mine"
    assert settings["json"].startswith(f"{phone.folder}/tmp/count-") and settings["json"].endswith(
        "/json.json"
    )


def test_all_inputs_and_outputs_of_verbs_can_be_copied() -> None:
    """Folders are the only inputs and outputs that can't; flags of a verb determine them."""
    for name, verb in REMOTE.items():
        given = {each.name for each in fields(verb.all_settings)} - {each.name for each in fields(verb.flags)}
        types = {**input_settings(verb.settings), **output_settings(verb.settings)}
        folders = {item for item in given if types.get(item) in (Input.FOLDER, Input.PATH, Output.FOLDER)}
        assert folders == ({"keys"} if name == "join" else set())


def test_the_date_of_a_run_is_sent_with_its_adapter(phone: FakePhone, workshop: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(workshop / "bundle" / "adapter", run / "final")
    (run / "config.yaml").write_text("date: '2020-02-29'\n")
    (run / "journal.jsonl").touch()
    (phone.folder / "runtime" / "run.sh").write_text('#!/bin/sh\ncat "$5"\n')
    arguments = ["eval", workshop / "bundle", "--data", workshop / "dev.jsonl"]
    sent = yaml.safe_load(phone.prge(*arguments, "--adapter", run).stdout)
    assert sent["date"] == "2020-02-29" and sent["adapter"].startswith(f"{phone.folder}/adapters/")
    assert yaml.safe_load(phone.prge(*arguments).stdout)["date"] is None
