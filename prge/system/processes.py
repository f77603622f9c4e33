"""What memory a process and its children take, looked at from outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.005


@dataclass
class MemoryPeak:
    """The most memory of a process and its children, in MB.

    `anonymous_mb` is what no file can give back, of all of them; `peak_rss_mb` (VmHWM) what was resident,
    pages of mapped files with it, of the one that had most.
    """

    anonymous_mb: float = 0.0
    peak_rss_mb: float = 0.0


@contextmanager
def watch_memory(number: int, every_seconds: float = POLL_SECONDS) -> Iterator[MemoryPeak]:
    """Look at a process, of that number, for a while."""
    peak, over = MemoryPeak(), threading.Event()

    def look() -> None:
        while not over.wait(every_seconds):
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


def _family(number: int) -> list[int]:
    try:
        children = Path(f"/proc/{number}/task/{number}/children").read_text(encoding="ascii").split()
    except OSError:  # it has ended, or the kernel doesn't tell of children
        children = []
    return [number, *(one for child in map(int, children) for one in _family(child))]


def _memory_of(number: int) -> tuple[float, float]:
    try:
        lines = Path(f"/proc/{number}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0, 0.0
    seen = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines if line.endswith(" kB")}
    return sum(seen.get(name, 0.0) for name in ("RssAnon", "RssShmem", "VmSwap")), seen.get("VmHWM", 0.0)
