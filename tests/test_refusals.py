"""A refused command changes nothing on disk, for every flag of every verb that names an output."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from prge.cli.bounds import flag
from prge.cli.field_types import contains_path_type, is_list_type, list_choices
from prge.cli.help import is_required
from prge.cli.inputs import input_settings
from prge.cli.main import VERBS, main
from prge.cli.outputs import Output, output_settings
from prge.cli.settings import PATH_LIKE_SETTINGS
from tests.bundles import make_bundle
from tests.verbs import prge

# Paths that a verb writes on another machine, or not at all.
NOT_WRITTEN_HERE = {("prge android run", "out"), ("prge estimate", "out")}
# Verbs that don't change the content of an existing folder.
ACCEPTED = {("prge fleet keys", "out"), ("prge rows forget", "file")}
SUFFIX = {("prge report", "out"): ".html"}
# Arguments that make a verb refuse a command before it would access the network or begin its work.
ADDITIONAL_ARGUMENTS = {"prge android bundle": ["--compiler", "no-such-compiler"]}


class Verb(NamedTuple):
    """A verb as users type it, with its settings."""

    prog: str
    settings: type[Any]
    field_types: Mapping[str, Any]


@functools.cache
def verbs() -> tuple[Verb, ...]:
    """Return all verbs and subcommands, found through their help."""
    result: list[Verb] = []
    below: list[str] = []

    def keep_settings(
        settings_type: type[Any], field_types: Mapping[str, Any], prog: str, shown: object
    ) -> None:
        result.append(Verb(prog, settings_type, field_types))

    def keep_verbs(prog: str, helps: Mapping[str, str], about: str, groups: Mapping[str, str]) -> None:
        below.extend(helps)

    with (
        mock.patch("prge.cli.settings.print_settings_help", keep_settings),
        mock.patch("prge.cli.subcommands.print_verbs_help", keep_verbs),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        for verb in VERBS:
            below.clear()
            main([verb, "--help"])
            for name in [*below]:
                main([verb, name, "--help"])
    return tuple(result)


def written() -> Iterator[tuple[Verb, str, Output]]:
    """Yield all settings of all verbs that name an output file or folder."""
    for verb in verbs():
        for name, output in output_settings(verb.settings).items():
            yield verb, name, output


def test_every_path_setting_is_an_input_or_an_output() -> None:
    progs = {verb.prog.removeprefix("prge ") for verb in verbs()}
    assert {verb for verb in VERBS if verb not in ("android", "fleet", "rows")} <= progs
    assert {"android bundle", "fleet serve", "rows forget"} <= progs
    unknown = {
        (verb.prog, name)
        for verb in verbs()
        for name, field_type in verb.field_types.items()
        if contains_path_type(field_type)
        and not {name} & {*input_settings(verb.settings), *output_settings(verb.settings)}
    }
    assert unknown == NOT_WRITTEN_HERE


# Stored text settings that don't name a path.
WORDS = {"columns", "estimator", "eval_at", "host", "on", "quantize", "roles", "target_modules", "when"}
WORDS |= {"adapt_layers", "date", "name", "server"}


def test_every_stored_text_setting_is_classified() -> None:
    """Paths in a folder's settings are restricted, see prge/formats/stored_settings.py."""
    here = [each for each in verbs() if "android" not in each.prog]
    kept = [each for each in here if {"STORED", "KEPT"} & {*dir(each.settings)}]
    assert {each.prog for each in kept} >= {"prge run", "prge tune", "prge fleet join"}
    texts = {
        name
        for verb in kept
        for name, field_type in verb.field_types.items()
        if not contains_path_type(field_type) and not list_choices(field_type) and "str" in str(field_type)
    }
    assert texts - {*PATH_LIKE_SETTINGS} == texts & WORDS


CONTENT = {
    "csv": b"name,born\nAda,1815\n",
    "safetensors": struct.pack("<Q", 2) + b"{}" + bytes(64),
    "no line break": b"a text without a line break",
    "binary": bytes(range(256)) * 8,
    "torn": b'{"id": "cmpl-1", "prompt": "a"}\n{"id": "cm',
}


def _file(content: bytes, mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content)
        path.chmod(mode)

    return make


def _link(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(CONTENT["csv"])
    target.chmod(0o644)
    path.symlink_to(target)


def _folder(path: Path) -> None:
    path.mkdir(mode=0o755)
    for number, (name, content) in enumerate(CONTENT.items()):
        (path / f"{name}.csv").write_bytes(content)
        (path / f"{name}.csv").chmod((0o400, 0o644, 0o755)[number % 3])


def _folder_of_names(*names: str) -> Callable[[Path], None]:
    """Return a folder with foreign files that have the names that verbs use."""

    def make(path: Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(b"something else")

    return make


EXISTING: Mapping[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "no folder for it": lambda path: path.parent.rmdir(),
    "csv": _file(CONTENT["csv"], 0o644),
    "safetensors": _file(CONTENT["safetensors"], 0o400),
    "no line break": _file(CONTENT["no line break"], 0o755),
    "binary": _file(CONTENT["binary"], 0o600),
    "torn": _file(CONTENT["torn"], 0o664),
    "empty": _file(b"", 0o644),
    "link": _link,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "folder": _folder,
    "lock": _folder_of_names("run.lock", "feedback.jsonl"),
    "settings": _folder_of_names("config.yaml", "device.yaml", "settings.yaml", "feedback.jsonl"),
    "figures": _folder_of_names("metrics.jsonl", "run.json", "log.txt", "final/adapter_config.json"),
    "results": _folder_of_names("log.txt", "final/a.txt", "adapter/a.txt", "rows/a.txt", "report.html"),
}


def _content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return modes and contents of all files in a folder."""
    result = {}
    for path in sorted(folder.rglob("*")):
        mode, content = path.lstat().st_mode, b""
        if stat.S_ISLNK(mode):
            content = os.fsencode(os.readlink(path))
        elif stat.S_ISREG(mode):
            content = path.read_bytes()
        result[str(path.relative_to(folder))] = mode, content
    return result


def _arguments(verb: Verb, written: str, given: Path) -> Sequence[str]:
    """Return arguments for all required settings except the given one."""
    items = {item.name: item for item in dataclasses.fields(verb.settings)}
    names = [name for name, item in items.items() if is_required(item)]
    for choice in getattr(verb.settings, "ONE_OF", ()):
        names += [] if set(choice) & {*names, written} else [choice[0]]
    arguments = ["--serial", "no-such-device"] if "serial" in verb.field_types else []
    for name in names:
        field_type = verb.field_types[name]
        if name == written:
            continue
        value: object
        if list_choices(field_type):
            value = list_choices(field_type)[0]
        elif name == "bundle":
            value = given / "bundle"
        elif name in output_settings(verb.settings):
            value = given / "other"
        elif contains_path_type(field_type) and name in ("run", "runs", "source", "folder"):
            value = given / "run"
        elif contains_path_type(field_type) or is_list_type(field_type):
            value = given / "rows.jsonl"
        else:
            value = given / "model"
        arguments += [flag(name), str(value)]
    return arguments


@pytest.mark.parametrize("has_inputs", [False, True])
@pytest.mark.parametrize(
    ("verb", "name", "output"), [pytest.param(*each, id=f"{each[0].prog} {each[1]}") for each in written()]
)
def test_a_refused_command_changes_nothing_where_it_would_write(
    verb: Verb, name: str, output: Output, has_inputs: bool, tmp_path: Path
) -> None:
    for variant, make in EXISTING.items():
        work = tmp_path / variant.replace(" ", "-")
        work.mkdir()
        input_folder = tmp_path / f"given-{work.name}"
        input_folder.mkdir()
        if has_inputs:
            make_bundle(input_folder / "bundle")
            (input_folder / "rows.jsonl").write_text('{"prompt": "a", "completion": " b"}\n' * 8)
            (input_folder / "run").mkdir()
            (input_folder / "model").mkdir()
        path = work / f"people{SUFFIX.get((verb.prog, name), '.csv')}"
        make(path)
        before = _content(tmp_path)
        arguments = [
            *verb.prog.split()[1:], *_arguments(verb, name, input_folder), flag(name), str(path),
            *ADDITIONAL_ARGUMENTS.get(verb.prog, []),
        ]  # fmt: skip
        ended = prge(*arguments, check=False, cwd=input_folder)
        after = _content(tmp_path)
        assert {key: after.get(key) for key in before} == before, (variant, ended)
        assert "Traceback" not in ended.stderr, (variant, ended)
        if ended.returncode == 0:
            assert (verb.prog, name) in ACCEPTED, (variant, ended)
            continue
        assert ended.returncode == 2, (variant, ended)
        assert after == before, (variant, ended)
