"""`prge android generate` and `chat`: arguments, settings and input that reach the phone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.device_runner.android.fake_adb import FakePhone

# A script instead of Python, which prints its arguments, settings and input, and ends with a code of its own.
ECHO = """#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done
cat "$5"
printf '\\0'
cat
echo an error >&2
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


def parsed(output: str) -> tuple[list[str], dict[str, Any], str]:
    """Parse the script's output: the arguments before `--config`, the settings, and the standard input."""
    *arguments, settings, read = output.split("\0")
    assert arguments[-2] == "--config"
    return arguments[:-2], yaml.safe_load(settings), read


def test_the_verb_uses_the_runs_bundle_and_the_runs_as_adapters(phone: FakePhone) -> None:
    done = phone.prge(
        "generate", "first", "base", "--prompt", "it's $HOME\n`ls`", "-", "--temperature", "0.5", "--json",
        "--stop", "a", "b", stdin="from here", code=7,
    )  # fmt: skip
    arguments, settings, read = parsed(done.stdout)
    assert arguments == ["-m", "prge.cli.main", "generate"]
    expected = {
        "bundle": "/data/my bundle",
        "adapter": [f"first={phone.folder}/runs/first", "base"],
        "temperature": 0.5,
        "stop": ["a", "b"],
        "prompt": ["it's $HOME\n`ls`", "from here"],
        "json": True,
    }
    assert {name: settings[name] for name in expected} == expected
    assert (read, done.stderr) == ("", "an error\n")


def test_the_model_without_adapter_may_come_first(phone: FakePhone) -> None:
    _, settings, _ = parsed(phone.prge("generate", "base", "first", "--prompt", "x", code=7).stdout)
    assert settings["adapter"] == ["base", f"first={phone.folder}/runs/first"]
    assert settings["bundle"] == "/data/my bundle"


def test_files_are_sent(phone: FakePhone, tmp_path: Path) -> None:
    for name in ("rows.jsonl", "task.yaml"):
        (tmp_path / name).write_text(name)
    done = phone.prge(
        "generate", "first", "--data", tmp_path / "rows.jsonl", "--task", tmp_path / "task.yaml", code=7
    )
    _, settings, _ = parsed(done.stdout)
    for setting, name in (("data", "rows.jsonl"), ("task", "task.yaml")):
        assert settings[setting].startswith(f"{phone.folder}/data/")
        assert Path(settings[setting]).read_text() == name


def test_chat_reads_lines_of_this_computer(phone: FakePhone) -> None:
    done = phone.prge("chat", "first", "second", "--max-tokens", 9, stdin="a dog\n/quit\n", code=7)
    arguments, settings, read = parsed(done.stdout)
    assert arguments[-1] == "chat" and settings["max_tokens"] == 9
    assert settings["adapter"] == [f"{name}={phone.folder}/runs/{name}" for name in ("first", "second")]
    assert read == "a dog\n/quit\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("third",), "has no run 'third'; it has: first, other, second"),
        (("first", "other"), "The runs have different bundles"),
        ((), "--bundle is missing"),
        (("base",), "has no run 'base'; it has: first, other, second"),
        (("../first",), "../first is not a bundle"),
    ],
)
def test_unusable_runs_are_refused_on_this_computer(
    phone: FakePhone, arguments: tuple[str, ...], message: str
) -> None:
    assert message in phone.prge("chat", *arguments, code=2).stderr


def test_flags_are_checked_before_the_phone_is_contacted(phone: FakePhone) -> None:
    phone.adb.unlink()
    assert "--temperature is -1.0" in phone.prge("chat", "first", "--temperature", "-1", code=2).stderr
    assert "--prompt or --messages or --data is missing" in phone.prge("generate", "first", code=2).stderr


def test_a_runtime_with_another_driver_is_refused(phone: FakePhone) -> None:
    manifest = next(path for path in (phone.folder / "runtime").iterdir() if path.suffix == ".json")
    manifest.write_text(json.dumps({"driver": "older"}))
    assert "has the driver of another version of prge" in phone.prge("chat", "first", code=2).stderr
