"""Only regular files are opened: no link is followed, no pipe waited for, no device touched."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from prge.host.regular_files import open_regular, read_regular


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
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str, mode: str) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    OTHERS[kind](tmp_path / "name")
    with pytest.raises(OSError, match=kind):
        open_regular(tmp_path / "name", mode)
    assert (tmp_path / "target").read_bytes() == b"kept"


@pytest.mark.parametrize("mode", ["rb", "wb"])
def test_devices_are_refused_through_a_link_that_may_be_followed_too(tmp_path: Path, mode: str) -> None:
    (tmp_path / "name").symlink_to("/dev/zero")
    for path in (tmp_path / "name", Path("/dev/zero")):
        with pytest.raises(OSError, match="device"):
            open_regular(path, mode, follow=True)


def test_a_link_to_a_file_is_followed_where_that_is_asked_for(tmp_path: Path) -> None:
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
