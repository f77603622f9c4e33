"""Processes that a benchmark measures: what memory they take, and steps that they take when asked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.005


@dataclass
class Peak:
    """The most memory of a process and its children, in MB.

    `anonymous_mb` is what no file can give back, of all of them; `peak_rss_mb` (VmHWM) what was resident,
    pages of mapped files with it, of the one that had most.
    """

    anonymous_mb: float = 0.0
    peak_rss_mb: float = 0.0


@contextmanager
def watched(number: int) -> Iterator[Peak]:
    """Look at a process, of that number, for a while."""
    peak, over = Peak(), threading.Event()

    def look() -> None:
        while not over.wait(_POLL_SECONDS):
            seen = [_memory_of(child) for child in _family(number)]
            peak.anonymous_mb = max(peak.anonymous_mb, sum(figures[0] for figures in seen))
            peak.peak_rss_mb = max([peak.peak_rss_mb, *(figures[1] for figures in seen)])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def forget(folder: Path) -> None:
    """Have the system drop what it keeps of the files in a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _family(number: int) -> list[int]:
    try:
        children = Path(f"/proc/{number}/task/{number}/children").read_text(encoding="ascii").split()
    except OSError:
        return []
    return [number, *(one for child in map(int, children) for one in _family(child))]


def _memory_of(number: int) -> tuple[float, float]:
    try:
        lines = Path(f"/proc/{number}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0, 0.0
    seen = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines if line.endswith(" kB")}
    return sum(seen.get(name, 0.0) for name in ("RssAnon", "RssShmem", "VmSwap")), seen.get("VmHWM", 0.0)


@dataclass
class Server:
    """A process that answers every line that it reads with numbers; see serve.py."""

    process: subprocess.Popen[str]

    def __call__(self) -> tuple[float, float]:
        """Seconds and loss of a step."""
        seconds, loss = self.answer()
        return seconds, loss

    def answer(self) -> list[float]:
        """The numbers of a step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return [float(number) for number in self.process.stdout.readline().split()]

    def memory(self, steps: int = 2) -> Peak:
        """What steps take."""
        with watched(self.process.pid) as peak:
            for _ in range(steps):
                self.answer()
                time.sleep(2 * _POLL_SECONDS)
        return peak


@contextmanager
def serving(method: str, folder: Path, *numbers: int) -> Iterator[Server]:
    """A method of serve.py that has answered its first line, and opened nothing yet."""
    words = [sys.executable, Path(__file__).with_name("serve.py"), method, folder, *numbers]
    threads = {"OMP_NUM_THREADS": "1"} if method in ("speaker", "stock-runner") else {}
    own = {"XDG_CACHE_HOME": str(folder / "cache"), **threads}
    variables = {"OMP_NUM_THREADS": "2", **os.environ, **own}
    with subprocess.Popen(
        [*map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
    ) as child:
        server = Server(child)
        server.answer()
        yield server
