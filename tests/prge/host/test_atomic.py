"""Folders and files that are whole or absent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from prge.errors import RunError
from prge.host.atomic import check_place, new_folder


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


def test_a_place_that_cant_be_written_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    check_place(tmp_path / "a" / "b", needed=1000)
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="can't be written: Not a directory"):
        check_place(tmp_path / "file" / "out")
    with pytest.raises(RunError, match=r"too little room: about 1,000,000,000,000 MB are needed, [\d,]+"):
        check_place(tmp_path / "out", needed=10**18)


def test_a_place_on_a_read_only_file_system_is_refused() -> None:
    """/proc takes no files, whoever asks."""
    with pytest.raises(RunError, match="can't be written"):
        check_place(Path("/proc/self/out"))
