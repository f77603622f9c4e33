"""Memory use of this process and of the machine, as Linux reports it under /proc."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]

OUT_OF_MEMORY_REMEDY = "Close other programs, give more memory, or use a smaller model or fewer rows."
# Messages of Python, the C++ library, the dynamic linker, XNNPACK and torch.
_OUT_OF_MEMORY = re.compile(
    "not enough memory|out of memory|out_of_memory|bad_alloc|cannot allocate memory|can't allocate memory|"
    "failed to allocate|failed to map segment|can't start new thread",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | str) -> bool:
    """Return whether an exception, or a library's log message, was caused by a lack of memory."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return _OUT_OF_MEMORY.search(str(error)) is not None


class PeakMemory:
    """Tracks the peak memory of a process: max(VmHWM, max(VmRSS + VmSwap)).

    VmHWM alone misses swapped-out memory, which phones compress instead. Only Linux reports both.
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
        """Mark loading as done: afterwards, `report` also returns the memory used beyond the current use."""
        self.sample()
        if self._peak is not None:
            fields = _kilobytes(self._status)
            self._peak_of_loading = self._peak
            self._loaded = fields.get("RssAnon", 0) + fields.get("VmSwap", 0)

    def sample(self) -> None:
        """Sample the memory once; call this every step, since VmSwap has no high-water mark."""
        try:
            fields = _kilobytes(self._status)
            now = max(fields["VmHWM"], fields["VmRSS"] + fields.get("VmSwap", 0))
        except OSError as error:
            self._reason = f"{self._status}: {error.strerror}"
        except KeyError as error:
            self._reason = f"{self._status} has no {error.args[0]}"
        else:
            self._peak = max(now, self._peak or 0)

    @property
    def peak(self) -> int | None:
        """Highest memory use so far in bytes; None if the system doesn't report it."""
        return self._peak

    def report(self) -> Record:
        """Return `peak_bytes` and the `method`; null and the `reason` if the peak is unknown.

        After `start`, the record also has `beyond_loaded_bytes`: memory beyond the loaded model, without
        mapped files; null if loading itself needed more.
        """
        self.sample()
        if self._peak is None:
            return {"peak_bytes": None, "reason": self._reason}
        report: Record = {"peak_bytes": self._peak, "method": self.method}
        if self._peak_of_loading is not None:
            beyond = None
            if self._peak > self._peak_of_loading:
                fields = _kilobytes(self._status)
                # The number of resident pages of mapped files only grows.
                files = fields.get("RssFile", 0) + fields.get("RssShmem", 0)
                beyond = max(0, self._peak - files - self._loaded)
            report["beyond_loaded_bytes"] = beyond
        return report


def resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Return the current memory use of this process in bytes, swap included; None if it is unknown."""
    try:
        fields = _kilobytes(status)
    except OSError:
        return None
    return fields["VmRSS"] + fields.get("VmSwap", 0) if "VmRSS" in fields else None


def release_freed_memory() -> None:
    """Collect reference cycles, such as those of graphs, and let glibc return its free pages."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def proportional_memory(status: Path = Path("/proc/self/smaps_rollup")) -> Record:
    """Return the proportional set size of this process as `bytes`, or null and the `reason`."""
    try:
        return {"bytes": _kilobytes(status)["Pss"], "method": f"Pss of {status}"}
    except OSError as error:
        return {"bytes": None, "reason": f"{status}: {error.strerror}"}
    except KeyError:
        return {"bytes": None, "reason": f"{status} has no Pss"}


def memory_info() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; empty if there is no such file."""
    try:
        return _kilobytes(Path("/proc/meminfo"))
    except OSError:
        return {}


def available_memory(groups: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes that this process can still allocate, by the machine and its control groups' limits.

    The result is 0 if the system doesn't report it.
    """
    limits = [memory_info().get("MemAvailable", 0)]
    for folder, names in _group_files(groups, process):
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int((folder / name).read_text(encoding="ascii")) for name in names[:2])
            files = re.search(
                rf"^{names[2]} (\d+)$", (folder / "memory.stat").read_text("ascii"), re.MULTILINE
            )
            limits.append(max(0, limit - used + int(files[1] if files else 0)))
    return min(limits)


def _group_files(groups: Path, process: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of this process's control groups up to the root, with the names of their fields.

    The three names are those of the limit, the usage, and the inactive pages of files.
    """
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
    """Parse lines such as `VmHWM:  1234 kB` of a file under /proc to bytes."""
    fields = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    return fields
