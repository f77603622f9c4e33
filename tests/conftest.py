"""Fixtures that several test modules share."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a file system of its own of a size such as `64k`; skips without the right to mount one."""
    mounted: list[Path] = []

    def make(size: str) -> Path:
        if shutil.which("mount") is None or not _may_mount():
            pytest.skip("takes mount, and the right to use it")
        disk = tmp_path / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
        mounted.append(disk)
        return disk

    yield make
    for disk in mounted:
        subprocess.run(["umount", disk], check=True)


def _may_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return any(int(line.split()[1], 16) >> 21 & 1 for line in lines if line.startswith("CapEff:"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of trained checkpoints and data beside the checkout; skips where there is none."""
    folder = Path(os.environ.get("PRGE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not folder.is_dir():
        pytest.skip(f"there is no folder {folder} (PRGE_SHARED names another)")
    return folder
