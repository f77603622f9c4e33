"""A verb that serves as a process of its own, and what tells whether it stood an attack."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop import REPOSITORY

_PATIENCE = 120.0


@dataclass(frozen=True)
class Service:
    """A running verb and the file of what it prints."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def is_alive(self) -> bool:
        """Whether it goes on."""
        return self.process.poll() is None

    def told(self, begin: int = 0) -> str:
        """What it has printed, from that byte on."""
        return self.log.read_bytes()[begin:].decode(errors="replace")

    def memory(self, name: str = "VmRSS") -> int:
        """Bytes of memory now, or with `VmHWM` the most so far; 0 if it has ended."""
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            return int(status.split(f"{name}:")[1].split()[0]) * 1024
        return 0

    def kill_children(self, module: str) -> int:
        """Kill the processes that it started to run a module; how many there were."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        numbers = [int(number) for path in tasks for number in path.read_text().split()]
        found = [each for each in numbers if module.encode() in Path(f"/proc/{each}/cmdline").read_bytes()]
        for number in found:
            os.kill(number, signal.SIGKILL)
        return len(found)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


def serving(log: Path, words: Sequence[object], until: str, **environment: str) -> Service:
    """Start a verb, and wait until it has printed `until`; raises RuntimeError with what it said instead."""
    command = [sys.executable, "-m", "prge.cli.main", *map(str, words)]
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=variables, cwd=REPOSITORY
        )
    service, deadline = Service(process, log), time.monotonic() + _PATIENCE
    while until not in service.told():
        if not service.is_alive or time.monotonic() > deadline:
            service.end()
            raise RuntimeError(f"prge {words[0]} doesn't serve:\n{service.told()}")
        time.sleep(0.05)
    return service
