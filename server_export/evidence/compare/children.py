"""Verbs in processes of their own, their output in a file."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from prge.files.run_folder import reported
from prge.verbs.starting import verb_code

SHOWN_LINES = 6


def run_verb(words: Sequence[str], log: Path) -> int:
    """Run `prge` with some words, append what it prints to `log`; returns its exit code."""
    with reported(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        stream = log.open("ab")
    with stream:
        stream.write(f"$ prge {shlex.join(words)}\n".encode())
        stream.flush()
        # Threads of torch spin while they wait, which costs the measured process its time.
        return verb_code(
            *words,
            environment={"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def last_words(log: Path, lines: int = SHOWN_LINES) -> str:
    """The last lines of a log: what a failed verb said."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    told = [line for line in text.splitlines() if line.strip() and not line.startswith("$ prge ")]
    return "\n".join(told[-lines:])
