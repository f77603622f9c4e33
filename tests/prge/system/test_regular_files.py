"""Only regular files are opened: links, pipes and devices are refused without waiting."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prge.system.regular_files import open_regular, read_regular, warn_if_key_is_shared


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


OTHERS: dict[str, Callable[[Path], object]] = {
    "a link": lambda path: path.symlink_to(path.with_name("target")),
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a socket": _socket,
}


@pytest.mark.parametrize("mode", ["rb", "wb", "ab", "a+b"])
@pytest.mark.parametrize("variant", OTHERS)
def test_other_types_of_files_are_refused_at_once(tmp_path: Path, variant: str, mode: str) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    OTHERS[variant](tmp_path / "name")
    with pytest.raises(OSError, match=variant):
        open_regular(tmp_path / "name", mode)
    assert (tmp_path / "target").read_bytes() == b"kept"


@pytest.mark.parametrize("mode", ["rb", "wb"])
def test_devices_are_refused_through_a_link_that_may_be_followed_too(tmp_path: Path, mode: str) -> None:
    (tmp_path / "name").symlink_to("/dev/zero")
    for path in (tmp_path / "name", Path("/dev/zero")):
        with pytest.raises(OSError, match="device"):
            open_regular(path, mode, follow=True)


def test_a_link_to_a_file_is_followed_on_request(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"content")
    (tmp_path / "name").symlink_to("target")
    assert read_regular(tmp_path / "name", follow=True) == b"content"


def test_a_writing_mode_makes_the_file(tmp_path: Path) -> None:
    for line in (b"first\n", b"second\n"):
        with open_regular(tmp_path / "new", "ab", buffering=0) as stream:
            stream.write(line)
    assert read_regular(tmp_path / "new") == b"first\nsecond\n"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing")


def test_a_key_that_others_may_read_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").touch(0o644)
    warn_if_key_is_shared(tmp_path / "key")
    assert "chmod 600" in capfd.readouterr().err
    (tmp_path / "key").chmod(0o600)
    warn_if_key_is_shared(tmp_path / "key")
    assert capfd.readouterr().err == ""


def test_standard_error_still_works_without_a_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    warn_if_key_is_shared(tmp_path / "key")
    print("a later message", file=sys.stderr, flush=True)
    assert capfd.readouterr().err == "a later message\n"
