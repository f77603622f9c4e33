"""Fixtures that several test modules share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# A process whose threads have computed can't be forked, and engines are tried in forked ones.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of trained checkpoints and data beside the checkout; skips where there is none."""
    folder = Path(os.environ.get("PRGE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not folder.is_dir():
        pytest.skip(f"there is no folder {folder} (PRGE_SHARED names another)")
    return folder
