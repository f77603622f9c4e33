"""Atomic files and folders, and checks of paths to write."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from prge.errors import RunError
from prge.system.atomic import check_file, check_writable_folder, new_folder, write_output
from tests.refusals import raises


@pytest.mark.parametrize(("mask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_a_folder_has_the_modes_that_the_user_wants(
    tmp_path: Path, mask: int, file_mode: int, folder_mode: int
) -> None:
    before = os.umask(mask)
    try:
        with new_folder(tmp_path / "out") as folder:
            (folder / "inner").mkdir(0o700)
            for path in (folder / "private", folder / "inner/private"):
                path.touch(0o600)
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (folder_mode if path.is_dir() else file_mode)


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    check_writable_folder(tmp_path / "a" / "b", required_bytes=1000)
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    with raises(RunError, "write-failed", containing=os.strerror(errno.ENOTDIR)):
        check_writable_folder(tmp_path / "file" / "out")
    with raises(RunError, "storage-full", containing="1,000,000,000,000"):
        check_writable_folder(tmp_path / "out", required_bytes=10**18)


def test_a_folder_on_a_read_only_file_system_is_refused() -> None:
    """/proc refuses new files, even from root."""
    with raises(RunError, "write-failed", "write-refused"):
        check_writable_folder(Path("/proc/self/out"))


def test_a_file_is_checked_without_a_change(tmp_path: Path) -> None:
    there, link, pipe = tmp_path / "there", tmp_path / "link", tmp_path / "pipe"
    there.write_bytes(b"old")
    os.utime(there, (0, 0))
    link.symlink_to(tmp_path / "none")
    os.mkfifo(pipe)
    before = {path: path.lstat() for path in (tmp_path, there, link, pipe)}
    for path in (there, link, pipe, tmp_path / "none" / "new"):
        check_file(path)
    for path, facts in before.items():
        now = path.lstat()
        assert (now.st_mode, now.st_size, now.st_mtime_ns, now.st_ino) == (
            *(facts.st_mode, facts.st_size, facts.st_mtime_ns, facts.st_ino),
        )


def test_a_file_that_cant_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path, errno.EISDIR), (tmp_path / "file" / "x", errno.ENOTDIR)):
        with raises(RunError, "write-failed", containing=os.strerror(reason)):
            check_file(path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    with raises(RunError, "write-refused"):
        check_file(tmp_path / "file")


def test_an_output_is_written_through_links_and_keeps_its_mode(tmp_path: Path) -> None:
    private, link = tmp_path / "private.json", tmp_path / "link.json"
    private.write_bytes(b"old, and longer")
    private.chmod(0o600)
    link.symlink_to(private)
    write_output(link, b"new")
    assert link.is_symlink() and private.read_bytes() == b"new"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    write_output(tmp_path / "a" / "b.json", b"new")
    assert (tmp_path / "a" / "b.json").read_bytes() == b"new"
    write_output(Path(os.devnull), b"new")
    with raises(RunError, "write-failed", containing=os.strerror(errno.EISDIR)):
        write_output(tmp_path, b"new")


def test_an_output_may_be_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_output(tmp_path / "pipe", b"new")
    reader.join(10)
    assert read == [b"new"]
