"""`prge android generate` and `chat`: which words reach the phone, and what goes through adb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.device_runner.android.fake_adb import FakePhone

# In the place of Python: says which words it got, what it reads, and ends with a code of its own.
ECHO = """#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done
printf 'read:'
cat
echo told >&2
exit 7
"""


@pytest.fixture
def phone(tmp_path: Path) -> FakePhone:
    phone = FakePhone(tmp_path / "fake")
    (phone.folder / "runtime" / "run.sh").write_text(ECHO)
    phone.write_settings("first", "/data/my bundle")
    phone.write_settings("second", "/data/my bundle")
    phone.write_settings("other", "/data/others")
    return phone


def words(output: str) -> tuple[list[str], str]:
    """The words that Python got, and what it read."""
    *found, read = output.split("\0")
    return found, read.removeprefix("read:")


def test_the_verb_runs_there_with_the_runs_bundle_and_the_runs_as_adapters(phone: FakePhone) -> None:
    done = phone.prge(
        "generate", "first", "base", "--prompt", "it's $HOME\n`ls`", "-", "--temperature", "0.5", "--json",
        "--stop", "a", "b", said="from here", code=7,
    )  # fmt: skip
    found, read = words(done.stdout)
    assert found == [
        *("-m", "prge.cli", "generate", "--bundle", "/data/my bundle"),
        *(f"--adapter=first={phone.folder}/runs/first", "--adapter=base"),
        *("--temperature=0.5", "--stop=a", "--stop=b"),
        *("--prompt=it's $HOME\n`ls`", "--prompt=from here", "--json"),
    ]
    assert (read, done.stderr) == ("", "told\n")


def test_files_are_brought(phone: FakePhone, tmp_path: Path) -> None:
    for name in ("rows.jsonl", "task.yaml"):
        (tmp_path / name).write_text(name)
    done = phone.prge(
        "generate", "first", "--data", tmp_path / "rows.jsonl", "--task", tmp_path / "task.yaml", code=7
    )
    found = dict(
        word.split("=", 1) for word in words(done.stdout)[0] if word.startswith(("--data", "--task"))
    )
    for flag, name in (("--data", "rows.jsonl"), ("--task", "task.yaml")):
        assert found[flag].startswith(f"{phone.folder}/data/")
        assert Path(found[flag]).read_text() == name


def test_chat_reads_the_lines_of_this_side(phone: FakePhone) -> None:
    done = phone.prge("chat", "first", "second", "--max-tokens", 9, said="a dog\n/quit\n", code=7)
    found, read = words(done.stdout)
    assert found[2] == "chat"
    assert found[-3:] == [
        f"--adapter=first={phone.folder}/runs/first",
        f"--adapter=second={phone.folder}/runs/second",
        "--max-tokens=9",
    ]
    assert read == "a dog\n/quit\n"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("third",), "has no run 'third'; it has: first, other, second"),
        (("first", "other"), "the runs have different bundles"),
        ((), "no run is named"),
        (("base",), "no run is named"),
        (("../first",), "can't be the name of a run"),
    ],
)
def test_what_can_not_speak_is_an_error_of_this_side(
    phone: FakePhone, given: tuple[str, ...], told: str
) -> None:
    assert told in phone.prge("chat", *given, code=2).stderr


def test_flags_are_checked_before_the_phone_is_asked(phone: FakePhone) -> None:
    phone.adb.unlink()
    assert "--temperature is -1.0" in phone.prge("chat", "first", "--temperature", "-1", code=2).stderr
    assert "--prompt or --messages or --data is missing" in phone.prge("generate", "first", code=2).stderr


def test_a_runtime_with_another_driver_is_refused(phone: FakePhone) -> None:
    manifest = next(path for path in (phone.folder / "runtime").iterdir() if path.suffix == ".json")
    manifest.write_text(json.dumps({"driver": "older"}))
    assert "has the driver of another prge" in phone.prge("chat", "first", code=2).stderr
