"""Memory of this process and of the machine, as Linux tells it under /proc."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]

OUT_OF_MEMORY_REMEDY = "close other programs, give more memory, or use a smaller model or fewer rows"
# As Python, the C++ library, the dynamic linker, XNNPACK and torch put it.
_NO_MEMORY = re.compile(
    "not enough memory|out of memory|out_of_memory|bad_alloc|cannot allocate memory|can't allocate memory|"
    "failed to allocate|failed to map segment|can't start new thread",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether an error, or what a library logged, comes from memory that ran out."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return _NO_MEMORY.search(str(error)) is not None


class PeakMemory:
    """Peak memory of a process: max(VmHWM, max(VmRSS + VmSwap)).

    VmHWM alone misses what was swapped out, which on a phone is compressed memory. Only Linux tells both.
    """

    method = "max(VmHWM, max(VmRSS + VmSwap)) of /proc/self/status"

    def __init__(self, status: Path = Path("/proc/self/status")) -> None:
        self._status = status
        self._peak: int | None = None
        self._peak_of_loading: int | None = None
        self._loaded = 0
        self._reason = ""
        self.sample()

    def start(self) -> None:
        """What is there now is loaded: `report` tells what comes on top."""
        self.sample()
        if self._peak is not None:
            seen = _kilobytes(self._status)
            self._peak_of_loading = self._peak
            self._loaded = seen.get("RssAnon", 0) + seen.get("VmSwap", 0)

    def sample(self) -> None:
        """Look once; call it every step, since VmSwap has no high-water mark."""
        try:
            seen = _kilobytes(self._status)
            now = max(seen["VmHWM"], seen["VmRSS"] + seen.get("VmSwap", 0))
        except OSError as error:
            self._reason = f"{self._status}: {error.strerror}"
        except KeyError as error:
            self._reason = f"{self._status} has no {error.args[0]}"
        else:
            self._peak = max(now, self._peak or 0)

    @property
    def peak(self) -> int | None:
        """The most seen so far, in bytes; None where the system does not tell."""
        return self._peak

    def report(self) -> Record:
        """`peak_bytes` and the `method`; where it can't be known, null and the `reason`.

        After `start` also `beyond_loaded_bytes`, without pages of files; null where loading took more.
        """
        self.sample()
        if self._peak is None:
            return {"peak_bytes": None, "reason": self._reason}
        report: Record = {"peak_bytes": self._peak, "method": self.method}
        if self._peak_of_loading is not None:
            beyond = None
            if self._peak > self._peak_of_loading:
                seen = _kilobytes(self._status)
                # Pages of mapped files only become more.
                files = seen.get("RssFile", 0) + seen.get("RssShmem", 0)
                beyond = max(0, self._peak - files - self._loaded)
            report["beyond_loaded_bytes"] = beyond
        return report


def resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Present memory of this process, swapped out or not; None where the system doesn't tell."""
    try:
        seen = _kilobytes(status)
    except OSError:
        return None
    return seen["VmRSS"] + seen.get("VmSwap", 0) if "VmRSS" in seen else None


def proportional_memory(status: Path = Path("/proc/self/smaps_rollup")) -> Record:
    """Present memory of this process with shared pages counted in part: `bytes`, or null and the `reason`."""
    try:
        return {"bytes": _kilobytes(status)["Pss"], "method": f"Pss of {status}"}
    except OSError as error:
        return {"bytes": None, "reason": f"{status}: {error.strerror}"}
    except KeyError:
        return {"bytes": None, "reason": f"{status} has no Pss"}


def memory_info() -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    try:
        return _kilobytes(Path("/proc/meminfo"))
    except OSError:
        return {}


def available_memory(groups: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process can still have: of the machine, or less where its control group has a limit.

    0 where the system doesn't tell.
    """
    found = [memory_info().get("MemAvailable", 0)]
    for folder, names in _group_files(groups, process):
        with contextlib.suppress(OSError, ValueError):
            most, used = (int((folder / name).read_text(encoding="ascii")) for name in names[:2])
            files = re.search(
                rf"^{names[2]} (\d+)$", (folder / "memory.stat").read_text("ascii"), re.MULTILINE
            )
            found.append(max(0, most - used + int(files[1] if files else 0)))
    return min(found)


def _group_files(groups: Path, process: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of this process's control groups, up to the root, with the names of limit, use, and of pages
    of files that nobody reads."""
    second = "memory.max", "memory.current", "inactive_file"
    first = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    with contextlib.suppress(OSError):
        for line in process.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = groups / controllers
                inner = root / path.lstrip("/")
                for folder in (inner, *inner.parents):
                    yield folder, first if controllers else second
                    if folder == root:
                        break


def _kilobytes(path: Path) -> dict[str, int]:
    """Lines such as `VmHWM:  1234 kB` of a file under /proc, in bytes."""
    fields = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    return fields
