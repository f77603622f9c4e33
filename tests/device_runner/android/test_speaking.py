"""`prge android generate` and `chat`: which words reach the phone, and what goes through adb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.device_runner.android.fake_adb import FakePhone

# In the place of Python: says which words, settings and lines it got, and ends with a code of its own.
ECHO = """#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done
cat "$5"
printf '\\0'
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


def asked(output: str) -> tuple[list[str], dict[str, Any], str]:
    """The words before `--config`, the settings in its file, and what was read."""
    *words, settings, read = output.split("\0")
    assert words[-2] == "--config"
    return words[:-2], yaml.safe_load(settings), read


def test_the_verb_runs_there_with_the_runs_bundle_and_the_runs_as_adapters(phone: FakePhone) -> None:
    done = phone.prge(
        "generate", "first", "base", "--prompt", "it's $HOME\n`ls`", "-", "--temperature", "0.5", "--json",
        "--stop", "a", "b", stdin="from here", code=7,
    )  # fmt: skip
    words, settings, read = asked(done.stdout)
    assert words == ["-m", "prge.cli.main", "generate"]
    given = {
        "bundle": "/data/my bundle",
        "adapter": [f"first={phone.folder}/runs/first", "base"],
        "temperature": 0.5,
        "stop": ["a", "b"],
        "prompt": ["it's $HOME\n`ls`", "from here"],
        "json": True,
    }
    assert {name: settings[name] for name in given} == given
    assert (read, done.stderr) == ("", "told\n")


def test_the_model_alone_may_come_first(phone: FakePhone) -> None:
    _, settings, _ = asked(phone.prge("generate", "base", "first", "--prompt", "x", code=7).stdout)
    assert settings["adapter"] == ["base", f"first={phone.folder}/runs/first"]
    assert settings["bundle"] == "/data/my bundle"


def test_files_are_brought(phone: FakePhone, tmp_path: Path) -> None:
    for name in ("rows.jsonl", "task.yaml"):
        (tmp_path / name).write_text(name)
    done = phone.prge(
        "generate", "first", "--data", tmp_path / "rows.jsonl", "--task", tmp_path / "task.yaml", code=7
    )
    _, settings, _ = asked(done.stdout)
    for setting, name in (("data", "rows.jsonl"), ("task", "task.yaml")):
        assert settings[setting].startswith(f"{phone.folder}/data/")
        assert Path(settings[setting]).read_text() == name


def test_chat_reads_the_lines_of_this_side(phone: FakePhone) -> None:
    done = phone.prge("chat", "first", "second", "--max-tokens", 9, stdin="a dog\n/quit\n", code=7)
    words, settings, read = asked(done.stdout)
    assert words[-1] == "chat" and settings["max_tokens"] == 9
    assert settings["adapter"] == [f"{name}={phone.folder}/runs/{name}" for name in ("first", "second")]
    assert read == "a dog\n/quit\n"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("third",), "has no run 'third'; it has: first, other, second"),
        (("first", "other"), "The runs have different bundles"),
        ((), "--bundle is missing"),
        (("base",), "has no run 'base'; it has: first, other, second"),
        (("../first",), "../first is not a bundle"),
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
    assert "has the driver of another version of prge" in phone.prge("chat", "first", code=2).stderr
