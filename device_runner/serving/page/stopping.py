"""Whether a run is running, in which process, and how to ask that process to stop after its step.

A run's lock names its process, but anyone who can write the folder can write another number. A signal is
therefore sent only to a process that has the lock open itself.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from prge.formats.run_folder import LOCK, is_held
from prge.system.regular_files import open_regular

PROCESSES = Path("/proc")


def process_state(folder: Path) -> tuple[bool, int | None]:
    """Return whether a process holds a run folder, and its id if this process may know and signal it."""
    try:
        with open_regular(folder / LOCK, "rb") as stream:
            process = int(stream.read(20))
            lock = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False, None
    try:
        opened = list((PROCESSES / str(process) / "fd").iterdir())
    except FileNotFoundError:
        # The process has ended, unless this system has no /proc.
        return not (PROCESSES / "self").exists() and is_held(folder), None
    except OSError:
        return is_held(folder), None
    has_it = process > 1 and any(_is_same(each, lock) for each in opened)
    return has_it, process if has_it and process != os.getpid() else None


def ask_to_stop(process: int) -> bool:
    """Ask a run's process to stop after its step; return whether the process exists."""
    try:
        os.kill(process, signal.SIGTERM)
    except OSError:
        return False
    return True


def _is_same(path: Path, facts: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), facts)
    except OSError:
        return False
