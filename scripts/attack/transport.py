"""Files on their way to and from a phone over adb, whose connection is cut after some bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

from outcome import Case
from workshop import Bench


def why_not() -> str:
    """Why nothing can be sent here; empty if it can."""
    return "not built"


def attack_a_transfer(bench: Bench, random: Random, folder: Path) -> tuple[list[Case], Counter[str]]:
    """Send a folder, or fetch one."""
    return [], Counter()
