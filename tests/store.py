"""Keep folders that take seconds to build, such as exported bundles, for all tests and later runs.

They are in pytest's cache, `.pytest_cache` of the repository; `pytest --cache-clear` empties it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Files that determine exports and tiny models. Reports, generation, evidence and the oracle change no bundle.
_CODE = (
    "prge/**/*.py",
    "server_export/**/*.py",
    "server_export/demo_data/**/*.*",
    "tests/tiny_models.py",
    "tests/device_runner/engines/chains.py",
)
_NOT = tuple(
    ROOT / room
    for room in (
        "prge/report",
        "prge/generation",
        *(f"server_export/{room}" for room in ("tune", "evidence", "publishing", "oracle.py")),
    )
)
_PACKAGES = ("torch", "executorch", "torchao", "transformers", "peft", "tokenizers", "numpy", "safetensors")
_DAY = 24 * 60 * 60


class Store:
    """Cached folders by name for the current code; others are deleted after a day without use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _key()
        self._folder.mkdir(parents=True, exist_ok=True)
        os.utime(self._folder)
        for other in folder.iterdir():
            if time.time() - other.stat().st_mtime > _DAY:
                shutil.rmtree(other, ignore_errors=True)

    def build_once(self, name: str, fill: Callable[[Path], object]) -> Path:
        """Return a read-only folder by name; the first caller fills it while other processes wait.

        Its files contain absolute paths, so it stays where it is filled.
        """
        source = Path(inspect.getfile(fill))
        folder = self._folder / f"{name}-{hashlib.sha256(source.read_bytes()).hexdigest()[:8]}"
        with folder.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.fstat(lock.fileno()).st_size:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                lock.write("filled")
        return folder


@lru_cache(maxsize=1)
def _key() -> str:
    result = hashlib.sha256(f"{ROOT} {sys.version}".encode())
    for package in _PACKAGES:
        result.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for path in sorted(path for pattern in _CODE for path in ROOT.glob(pattern)):
        if not any(path.is_relative_to(room) for room in _NOT):
            result.update(f"{path.relative_to(ROOT)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return result.hexdigest()[:16]
