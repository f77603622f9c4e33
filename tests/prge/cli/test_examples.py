"""Help begins with an example of a command, which is valid."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path

import pytest
from reference import VerbHelp, verb_helps

from device_runner.android.command import ACTIONS as ANDROID
from device_runner.fleet.command import ACTIONS as FLEET
from prge.cli.main import VERBS, main
from prge.cli.settings import parse_settings


@cache
def helps() -> tuple[VerbHelp, ...]:
    return tuple(verb_helps())


def test_every_verb_and_subcommand_has_an_example() -> None:
    progs = {each.prog for each in helps()}
    groups = {"android", "fleet", "rows"}
    assert {f"prge {verb}" for verb in VERBS.keys() - groups} <= progs
    assert {f"prge android {name}" for name in ANDROID.keys() - groups} <= progs
    assert {f"prge fleet {name}" for name in FLEET} <= progs
    for each in helps():
        # A class that inherits its fields has an example of its own, because it belongs to another command.
        assert isinstance(vars(each.settings).get("EXAMPLE"), str), f"{each.prog} has no EXAMPLE"


def test_every_example_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for each in helps():
        arguments = shlex.split(each.settings.EXAMPLE)
        assert isinstance(parse_settings(each.settings, arguments, each.prog, each.positional), each.settings)
    assert capsys.readouterr().err == ""  # no flag is repeated or has an old name
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("verb", "example"),
    [
        ("run", "prge run --bundle bundle --train rows.jsonl --out run"),
        ("android run", "prge android run --bundle bundle --train rows.jsonl --out run"),
        ("fleet status", "prge fleet status fleet"),
        ("doctor", "prge doctor"),
    ],
)
def test_help_begins_with_the_example(verb: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"example: {example}"
    assert second.startswith(f"usage: prge {verb} ")
