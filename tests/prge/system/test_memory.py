"""Peak memory includes swap; out-of-memory errors are recognised by their messages."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from prge.system import memory as module
from prge.system.memory import (
    PeakMemory,
    available_memory,
    is_out_of_memory,
    proportional_memory,
    resident_bytes,
)

STATUS = "Name:\tpython\nVmHWM:\t    500 kB\nVmRSS:\t    {rss} kB\nVmSwap:\t    {swap} kB\nThreads:\t2\n"


def test_peak_memory_includes_swap(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text(STATUS.format(rss=400, swap=0), encoding="utf-8")
    memory = PeakMemory(status)
    assert memory.report()["peak_bytes"] == 500 * 1024
    status.write_text(STATUS.format(rss=300, swap=600), encoding="utf-8")
    memory.sample()
    status.write_text(STATUS.format(rss=100, swap=0), encoding="utf-8")
    assert memory.report() == {"peak_bytes": 900 * 1024, "method": PeakMemory.method}


@pytest.mark.parametrize(("peak", "beyond"), [(500, None), (700, 250 * 1024)])
def test_memory_beyond_the_loaded_model(tmp_path: Path, peak: int, beyond: int | None) -> None:
    status = tmp_path / "status"
    status.write_text(STATUS.format(rss=400, swap=50) + "RssAnon:\t 300 kB\n", encoding="utf-8")
    memory = PeakMemory(status)
    memory.start()
    later = STATUS.format(rss=450, swap=0).replace("500", str(peak)) + "RssFile:\t 100 kB\n"
    status.write_text(later, encoding="utf-8")
    assert memory.report()["beyond_loaded_bytes"] == beyond


def test_present_memory_includes_swap(tmp_path: Path) -> None:
    status = tmp_path / "status"
    assert resident_bytes(status) is None
    status.write_text("VmSwap:\t 3 kB\n", encoding="utf-8")
    assert resident_bytes(status) is None
    status.write_text(STATUS.format(rss=300, swap=600), encoding="utf-8")
    assert resident_bytes(status) == 900 * 1024


def test_proportional_memory(tmp_path: Path) -> None:
    rollup = tmp_path / "smaps_rollup"
    assert proportional_memory(rollup) == {"bytes": None, "reason": f"{rollup}: No such file or directory"}
    rollup.write_text("aa-bb ---p 00000000 00:00 0 [rollup]\nRss:   9 kB\n")
    assert proportional_memory(rollup) == {"bytes": None, "reason": f"{rollup} has no Pss"}
    rollup.write_text("aa-bb ---p 00000000 00:00 0 [rollup]\nRss:   9 kB\nPss:   7 kB\n")
    assert proportional_memory(rollup)["bytes"] == 7 * 1024


def test_peak_memory_of_this_process() -> None:
    if not Path("/proc/self/status").exists():
        assert PeakMemory().report()["peak_bytes"] is None
        return
    peak = PeakMemory().report()["peak_bytes"]
    assert peak >= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 * 0.9


@pytest.mark.parametrize("content", [None, "VmRSS:\t 3 kB\n"])
def test_an_unknown_peak_memory_is_null_with_a_reason(tmp_path: Path, content: str | None) -> None:
    status = tmp_path / "status"
    if content is not None:
        status.write_text(content, encoding="utf-8")
    report = PeakMemory(status).report()
    assert report["peak_bytes"] is None
    assert str(status) in report["reason"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        ImportError("libgomp.so.1: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        "XNN Runtime creation failed with code: xnn_status_out_of_memory",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_memory_that_ran_out_is_recognised(error: BaseException | str) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("damaged"), ""]
)
def test_other_errors_are_not_taken_for_lack_of_memory(error: BaseException | str) -> None:
    assert not is_out_of_memory(error)


LINES = {
    "0::/user/run": ("memory.max", "memory.current", "inactive_file"),
    "4:memory:/user/run": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(
    ("group", "group_limit", "expected"),
    [
        (None, "", 9_000),
        ("user/run", "1000", 1000 - 800 + 300),
        ("user", "1000", 1000 - 800 + 300),
        ("user", "700", 200),
        ("user/run", "400", 0),
        ("user/run", "max", 9_000),
    ],
)
def test_available_memory_respects_control_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    group: str | None,
    group_limit: str,
    expected: int,
) -> None:
    """Inactive pages of files count as free."""
    monkeypatch.setattr(module, "memory_info", lambda: {"MemAvailable": 9_000})
    process = tmp_path / "cgroup"
    process.write_text(f"{line}\n", encoding="utf-8")
    if group is not None:
        folder = tmp_path / "groups" / ("memory" if "memory" in line else "") / group
        folder.mkdir(parents=True)
        limit, used, files = LINES[line]
        (folder / limit).write_text(f"{group_limit}\n")
        (folder / used).write_text("800\n")
        (folder / "memory.stat").write_text(f"anon 500\n{files} 300\n")
    assert available_memory(tmp_path / "groups", process) == expected


def test_unknown_memory_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_info", dict)
    assert available_memory(tmp_path, tmp_path / "none") == 0
