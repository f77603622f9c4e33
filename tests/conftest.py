"""Fixtures that several test modules share."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

# A process whose threads have computed can't be forked, and engines are tried in forked ones.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """A folder by its name, filled in the test process that asks first: others wait for it, and share it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def made(name: str, fill: Callable[[Path], object]) -> Path:
        folder = root / name
        with (root / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.fstat(lock.fileno()).st_size:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                lock.write("filled")
        return folder

    return made


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of trained checkpoints and data beside the checkout; skips where there is none."""
    folder = Path(os.environ.get("PRGE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not folder.is_dir():
        pytest.skip(f"there is no folder {folder} (PRGE_SHARED names another)")
    return folder
