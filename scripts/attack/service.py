"""Start a serving verb as a process and observe it during an attack."""

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
    """A running verb with the file of its output."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None

    def output(self, begin: int = 0) -> str:
        """Return the output from a byte offset on."""
        return self.log.read_bytes()[begin:].decode(errors="replace")

    def memory(self, name: str = "VmRSS") -> int:
        """Return the memory in bytes, or with `VmHWM` its peak; 0 if the process has ended."""
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            return int(status.split(f"{name}:")[1].split()[0]) * 1024
        return 0

    def kill_children(self, module: str) -> int:
        """Kill child processes that run a module and return their number."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        numbers = [int(number) for path in tasks for number in path.read_text().split()]
        matching = [each for each in numbers if module.encode() in Path(f"/proc/{each}/cmdline").read_bytes()]
        for number in matching:
            os.kill(number, signal.SIGKILL)
        return len(matching)

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()


def start_service(log: Path, arguments: Sequence[object], until: str, **environment: str) -> Service:
    """Start a verb and wait until it has printed `until`; raises RuntimeError with its output otherwise."""
    command = [sys.executable, "-m", "prge.cli.main", *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=variables, cwd=REPOSITORY
        )
    service, deadline = Service(process, log), time.monotonic() + _PATIENCE
    while until not in service.output():
        if not service.is_alive or time.monotonic() > deadline:
            service.end()
            raise RuntimeError(f"prge {arguments[0]} doesn't serve:\n{service.output()}")
        time.sleep(0.05)
    return service
