"""Folders and files that are whole or absent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from prge.host.atomic import new_folder


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
