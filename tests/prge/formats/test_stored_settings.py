"""Which paths in a folder's settings are trusted, and how prge recognizes settings that it wrote."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from prge.errors import RunError
from prge.formats.documents import parse_yaml
from prge.formats.stored_settings import (
    check_links,
    has_own_signature,
    is_outside,
    key_path,
    new_key,
    parse_key,
    sign,
    write_settings,
)
from tests.refusals import raises

TEXT = "bundle: /a/b\ntrain: /home/me/rows.csv\n"


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_only_unchanged_settings_are_recognized(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_settings(path, TEXT)
    content = path.read_bytes()
    assert has_own_signature(content, "config.yaml") and parse_yaml(content) == parse_yaml(TEXT)
    line = content[len(TEXT) :]
    forged = [
        TEXT.encode(),
        content.replace(b"rows", b"keys"),
        b"# a\n" + content,
        content + b"train: /home/me/.ssh/id_rsa\n",
        content + line,
        content[:-1],
        b"",
        line,
        TEXT.encode() + b"# signed by prge: " + b"0" * 64 + b"\n",
    ]
    assert not any(has_own_signature(each, "config.yaml") for each in forged)
    assert not has_own_signature(content, "device.yaml")


def test_the_key_is_private_and_created_once(own_home: Path) -> None:
    assert not has_own_signature(TEXT.encode(), "a") and not key_path().exists()
    first = sign(TEXT, "a")
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert stat.S_IMODE(key_path().parent.stat().st_mode) == 0o700
    assert sign(TEXT, "a") == first and [*key_path().parent.iterdir()] == [key_path()]
    key_path().unlink()
    assert not has_own_signature(first, "a")


def is_own_in_another_process(path: Path, **environment: str) -> bool:
    """Return whether another process, with this or another environment, recognizes a file."""
    script = (
        "import pathlib, sys; from prge.formats.stored_settings import has_own_signature;"
        "print(has_own_signature(pathlib.Path(sys.argv[1]).read_bytes(), 'a'))"
    )
    command, given = [sys.executable, "-c", script, str(path)], {**os.environ, **environment}
    output = subprocess.run(command, env=given, check=True, capture_output=True, text=True).stdout
    return output.strip() == "True"


def test_another_process_recognizes_them_and_another_user_does_not(own_home: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(sign(TEXT, "a"))
    assert is_own_in_another_process(tmp_path / "a")
    assert not is_own_in_another_process(tmp_path / "a", XDG_CONFIG_HOME=str(tmp_path / "other"))


@pytest.mark.parametrize("damage", ["no home", "no folder", "no key", "link"])
def test_without_a_key_a_process_recognizes_its_own_settings(
    damage: str, monkeypatch: pytest.MonkeyPatch, own_home: Path, tmp_path: Path
) -> None:
    key_path().parent.mkdir(parents=True)
    if damage == "no home":
        monkeypatch.delenv("XDG_CONFIG_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    elif damage == "no folder":
        key_path().parent.rmdir()
        key_path().parent.write_text("a file")
    elif damage == "no key":
        key_path().write_bytes(b"")
    else:
        key_path().symlink_to("/dev/zero")
    content = sign(TEXT, "a")
    assert has_own_signature(content, "a")
    (tmp_path / "a").write_bytes(content)
    assert not is_own_in_another_process(tmp_path / "a", HOME=str(tmp_path))


def test_a_key_is_created_without_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    content = sign(TEXT, "a")
    assert parse_key(key_path().read_bytes()) and has_own_signature(content, "a")


def test_settings_can_be_signed_for_another_machine() -> None:
    key = new_key()
    content = sign(TEXT, "a", key)
    assert not has_own_signature(content, "a")
    sign(TEXT, "a")
    key_path().write_bytes(key + b"\n")
    assert has_own_signature(content, "a")


def test_values_outside_of_the_folder_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    (folder / "rows").mkdir(parents=True)
    (folder / "rows/train.jsonl").write_text("{}")
    (tmp_path / "private.csv").write_text("a")
    (tmp_path / "run-2").mkdir()
    (folder / "link").symlink_to(tmp_path / "private.csv")
    (folder / "up").symlink_to("..")
    (folder / "loop").symlink_to("loop")
    (folder / "inner").symlink_to("rows")
    (tmp_path / "also").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    descriptor = os.open(tmp_path / "private.csv", os.O_RDONLY)
    out = [
        *(str(tmp_path / "private.csv"), "private.csv", "./private.csv", "run/../private.csv"),
        *(f"{folder}/../private.csv", f"{folder}/link", f"{folder}/up/private.csv", f"{folder}-2"),
        *("~/private.csv", "/etc/passwd", "/proc/self/environ", f"/proc/self/fd/{descriptor}"),
        *("/proc/self/cwd/private.csv", f"/proc/self/root{tmp_path}/private.csv", "/dev/stdin"),
        *("nowhere/at/all", "me/private-rows", "/", ".", "..", "a\0b/c", str(folder / "rows\0")),
    ]
    inside = [
        *(str(folder), "run", "run/rows/train.jsonl", f"{folder}/rows/../rows/new.csv", f"{folder}/inner/a"),
        *("also/rows/train.jsonl", "/proc/self/cwd/run/rows/train.jsonl", f"{folder}/up/run/rows"),
    ]
    names = ["sst2", "plain", "gpt2", "private", "lora"]
    assert [each for each in out if not is_outside(folder, each)] == []
    assert [each for each in (*inside, *names) if is_outside(folder, each)] == []
    # Outputs are created in the folder, whatever exists there now.
    assert [each for each in (*out, *names) if not is_outside(folder, each, is_written=True)] == []
    assert [each for each in inside if is_outside(folder, each, is_written=True)] == []
    os.close(descriptor)


def test_a_snapshot_of_the_hub_has_links_to_its_own_files(tmp_path: Path) -> None:
    repository = tmp_path / "models--me--adapter"
    snapshot = repository / "snapshots/0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs/a").write_text("")
    (snapshot / "adapter_config.json").symlink_to("../../blobs/a")
    check_links(snapshot)
    (repository / "blobs").rename(tmp_path / "private")
    (repository / "blobs").symlink_to(tmp_path / "private")
    with raises(RunError, "link-outside", containing="adapter_config.json"):
        check_links(snapshot)


def test_links_to_the_outside_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "a/b").mkdir(parents=True)
    (folder / "a/file").write_text("")
    (folder / "inner").symlink_to("a/file")
    (folder / "a/b/back").symlink_to("../..")
    check_links(folder)
    for target in (tmp_path, tmp_path / "gone", "/proc/self/fd/0"):
        (folder / "a/b/link").symlink_to(target)
        with raises(RunError, "link-outside", containing="a/b/link"):
            check_links(folder)
        (folder / "a/b/link").unlink()
