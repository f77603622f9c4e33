"""Measured processes that take a step for each line of input, other commands, and cold files."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prge.system.processes import POLL_SECONDS, MemoryPeak, watch_memory


def drop_from_cache(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class LackingError(Exception):
    """Something that a measurement needs is unavailable on this machine; the message says why."""


def run_command(command: Sequence[object], limit: float | None = None) -> None:
    """Run a command without output.

    Raises:
        LackingError: it fails, or takes more than `limit` seconds; with the beginning of its messages.
    """
    words = [*map(str, command)]
    out, errors = subprocess.DEVNULL, subprocess.PIPE
    try:
        result = subprocess.run(words, stdout=out, stderr=errors, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        raise LackingError(f"it takes more than {limit:.0f} seconds") from None
    if result.returncode:
        raise LackingError(result.stderr.strip() or "it says nothing")


@dataclass
class Server:
    """A process that prints numbers for every line that it reads; see serve.py."""

    process: subprocess.Popen[str]

    def __call__(self) -> tuple[float, float]:
        """Return seconds and loss of a step."""
        seconds, loss = self.take_step()
        return seconds, loss

    def take_step(self, within_seconds: float | None = None) -> list[float]:
        """Return the numbers of a step.

        Raises:
            TimeoutError: the step takes longer than `within_seconds`.
            ChildProcessError: the process has ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], within_seconds)[0]:
            raise TimeoutError
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError(f"the process ended with code {self.process.wait()}")
        return [float(number) for number in line.split()]

    def memory(self, steps: int = 2) -> MemoryPeak:
        """Return the peak memory of steps."""
        with watch_memory(self.process.pid) as peak:
            for _ in range(steps):
                self.take_step()
                time.sleep(2 * POLL_SECONDS)
        return peak


@contextmanager
def start_process(arguments: Sequence[object], variables: Mapping[str, str]) -> Iterator[Server]:
    """Start a process with extra environment variables and yield it after its first line."""
    with subprocess.Popen(
        [*map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as child:
        try:
            server = Server(child)
            server.take_step()
            yield server
        except (TimeoutError, BrokenPipeError):
            child.kill()
            raise


@contextmanager
def start_method(method: str, folder: Path, *numbers: int) -> Iterator[Server]:
    """Start a method of serve.py and yield it after its first line, before it opens anything."""
    arguments = [sys.executable, Path(__file__).with_name("serve.py"), method, folder, *numbers]
    threads = "1" if method in ("generator", "stock-runner") else os.environ.get("OMP_NUM_THREADS", "2")
    variables = {"OMP_NUM_THREADS": threads, "XDG_CACHE_HOME": str(folder / "cache")}
    with start_process(arguments, variables) as server:
        yield server
