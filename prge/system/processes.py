"""Memory use of a process and its children, measured from another process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.005


@dataclass
class MemoryPeak:
    """Peak memory of a process and its children, in MB.

    Attributes:
        anonymous_mb: peak of the sum over all processes of anonymous memory, swap included.
        peak_rss_mb: largest VmHWM of one process, mapped files included.
    """

    anonymous_mb: float = 0.0
    peak_rss_mb: float = 0.0


@contextmanager
def watch_memory(number: int, every_seconds: float = POLL_SECONDS) -> Iterator[MemoryPeak]:
    """Sample the memory of a process and its children in a thread while the block runs."""
    peak, finished = MemoryPeak(), threading.Event()

    def sample() -> None:
        while not finished.wait(every_seconds):
            memory = [_memory_of(child) for child in _descendants(number)]
            peak.anonymous_mb = max(peak.anonymous_mb, sum(figures[0] for figures in memory))
            peak.peak_rss_mb = max([peak.peak_rss_mb, *(figures[1] for figures in memory)])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        finished.set()
        thread.join()


def _descendants(number: int) -> list[int]:
    try:
        children = Path(f"/proc/{number}/task/{number}/children").read_text(encoding="ascii").split()
    except OSError:  # the process has ended, or the kernel doesn't list children
        children = []
    return [number, *(process for child in map(int, children) for process in _descendants(child))]


def _memory_of(number: int) -> tuple[float, float]:
    try:
        lines = Path(f"/proc/{number}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0, 0.0
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines if line.endswith(" kB")}
    return sum(fields.get(name, 0.0) for name in ("RssAnon", "RssShmem", "VmSwap")), fields.get("VmHWM", 0.0)
