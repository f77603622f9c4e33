"""Verbs in processes of their own, their output in a file."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from prge.errors import RunError
from prge.run_folder import LOCK, reported, run_lock

_PARENT_DEATH_SIGNAL = 1
SHOWN_LINES = 6


def run_verb(words: Sequence[str], log: Path) -> int:
    """Run `prge` with some words, append what it prints to `log`; returns its exit code.

    The child is told to stop, which a run does after its step, when this process is interrupted or killed.
    """
    command = [sys.executable, "-m", "prge.cli", *words]
    # Threads of torch spin while they wait, which costs the measured process its time.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with reported(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        stream = log.open("ab")
    with stream:
        stream.write(f"$ prge {shlex.join(words)}\n".encode())
        stream.flush()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            return child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise


def last_words(log: Path, lines: int = SHOWN_LINES) -> str:
    """The last lines of a log: what a failed verb said."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    told = [line for line in text.splitlines() if line.strip() and not line.startswith("$ prge ")]
    return "\n".join(told[-lines:])


def wait_until_free(run: Path, seconds: float = 60.0) -> None:
    """Wait for the process that still holds a run folder, such as the child of a killed comparison.

    Raises:
        RunError: it holds it for longer.
    """
    deadline = time.monotonic() + seconds
    while (run / LOCK).exists():
        try:
            with run_lock(run):
                return
        except RunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
