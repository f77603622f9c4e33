"""Run verbs in child processes with their output in a file, and measure an idle process's memory."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from prge.cli.subprocesses import exit_code_of
from prge.formats.run_folder import as_run_error

# torch's threads spin while they wait, which would slow the measured process down.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
# Imports the modules that a run imports.
_IDLE = """
import importlib, json
from prge.cli.main import VERBS
from prge.system.memory import PeakMemory
importlib.import_module(VERBS["run"].module)
print(json.dumps(PeakMemory().report()))
"""


def run_verb(words: Sequence[str], log: Path) -> int:
    """Run `prge` with the given arguments, append its output to `log`, and return the exit code."""
    with as_run_error(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        stream = log.open("ab")
    with stream:
        stream.write(f"$ prge {shlex.join(words)}\n".encode())
        stream.flush()
        return exit_code_of(
            *words,
            environment=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def last_lines(log: Path, lines: int = 2) -> str:
    """Return the last lines of a log, such as the error message of a failed verb."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines_of_verb = [line for line in text.splitlines() if line.strip() and not line.startswith("$ prge ")]
    return "\n".join(lines_of_verb[-lines:])


def idle_memory() -> int | None:
    """Return the peak bytes of an idle runner, or None if the system doesn't report them."""
    command = [sys.executable, "-c", _IDLE]
    environment = {**_ENVIRONMENT, **os.environ}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    peak: int | None = json.loads(result.stdout)["peak_bytes"]
    return peak
