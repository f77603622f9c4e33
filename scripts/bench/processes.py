"""Processes that a benchmark measures: steps that they take when asked, and files that are cold."""

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


def forget(folder: Path) -> None:
    """Have the system drop what it keeps of the files in a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass
class Server:
    """A process that answers every line that it reads with numbers; see serve.py."""

    process: subprocess.Popen[str]

    def __call__(self) -> tuple[float, float]:
        """Seconds and loss of a step."""
        seconds, loss = self.answer()
        return seconds, loss

    def answer(self, within_seconds: float | None = None) -> list[float]:
        """The numbers of a step.

        Raises:
            TimeoutError: it takes longer.
            ChildProcessError: the process has ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], within_seconds)[0]:
            raise TimeoutError
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError(f"it ended with code {self.process.wait()}")
        return [float(number) for number in line.split()]

    def memory(self, steps: int = 2) -> MemoryPeak:
        """What steps take."""
        with watch_memory(self.process.pid) as peak:
            for _ in range(steps):
                self.answer()
                time.sleep(2 * POLL_SECONDS)
        return peak


@contextmanager
def answering(words: Sequence[object], variables: Mapping[str, str]) -> Iterator[Server]:
    """A process that answers, with these variables besides its own, and has answered its first line."""
    with subprocess.Popen(
        [*map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as child:
        try:
            server = Server(child)
            server.answer()
            yield server
        except (TimeoutError, BrokenPipeError):
            child.kill()
            raise


@contextmanager
def serving(method: str, folder: Path, *numbers: int) -> Iterator[Server]:
    """A method of serve.py that has answered its first line, and opened nothing yet."""
    words = [sys.executable, Path(__file__).with_name("serve.py"), method, folder, *numbers]
    threads = "1" if method in ("speaker", "stock-runner") else os.environ.get("OMP_NUM_THREADS", "2")
    variables = {"OMP_NUM_THREADS": threads, "XDG_CACHE_HOME": str(folder / "cache")}
    with answering(words, variables) as server:
        yield server
