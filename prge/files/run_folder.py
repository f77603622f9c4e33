"""A run folder: the names in it, and what a run leaves besides its adapter: metrics, log, summary, lock."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from prge.errors import RunError
from prge.host.atomic import storage_error, write_file, write_output
from prge.host.memory import PeakMemory, memory_info
from prge.host.regular_files import open_regular, read_regular

CONFIG = "config.yaml"
JOURNAL = "journal.jsonl"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
LOG = "log.txt"
SUMMARY = "run.json"
LOCK = "run.lock"
CHECKPOINTS = "checkpoints"
FINAL = "final"
TRUNK_CACHE = "trunk_cache"
REFERENCE = "reference.json"
# Statuses in the summary of a run with a result, and of one that can't go on.
FINISHED = ("completed", "stopped early")
ENDED = (*FINISHED, "diverged")
# What `prge tune` decided, beside its run: `decisions` is a list of {name, value, why}.
DECISIONS = "tune.json"

_PACKAGES = ("numpy", "safetensors", "tokenizers", "torch", "executorch", "torchao", "transformers", "peft")

Record = dict[str, Any]

# Of a record of metrics.jsonl: what is drawn, and what a resumed run goes on from.
_NUMBERS = (
    "loss",
    "value",
    "rows",
    "seconds",
    "largest_tangent",
    "accuracy",
    "f1",
    "exact_match",
    "rouge_l",
    "perplexity",
    "pairs_right",
    "margin",
    "chosen_change",
    "rejected_change",
)
_MOST = 1e300
# The process that holds a lock, or nothing.
_LONGEST_HOLDER = 20
_MADE_LOCK = re.compile(rb"\d*\n?")
# Attempts to lock what other processes remove meanwhile.
_ATTEMPTS = 50
# Looks at a lock whose holder has ended, and the time before each.
_LOOKS, _LOOK_SECONDS = 40, 0.05


class RunLog:
    """metrics.jsonl and log.txt of one run folder, open for appending.

    Every line is on its way to storage when the call returns, so a killed run loses at most the line that it
    was writing.
    """

    def __init__(self, folder: Path, keep_through: int | None = None) -> None:
        """Open both files, creating the folder if need be.

        Args:
            folder: the run folder.
            keep_through: when a run resumes, the last step whose records stay; None keeps all. Lines that
                are torn or no records always go.

        Raises:
            RunError: the folder can't be written, or one of the files is a link, a pipe or a device.
        """
        self.folder = folder
        self.memory = PeakMemory()
        with reported(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its log shows a row
            self._log = open_regular(folder / LOG, "ab", buffering=0)
            self.records = self._kept_records(keep_through)
            self._metrics = open_regular(folder / METRICS, "ab", buffering=0)

    def metric(self, record: Mapping[str, Any]) -> None:
        """Append one record to metrics.jsonl; infinite numbers and NaN are written as null."""
        plain = _plain(record)
        with reported(self.folder):
            _append(self._metrics, json.dumps(plain, allow_nan=False))
        self.records.append(plain)
        self.memory.sample()

    def text(self, line: str) -> None:
        """Append one line to log.txt, with the time before it."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with reported(self.folder):
            _append(self._log, f"{now} {line}")

    def last(self, event: str) -> Record | None:
        """The newest record of an event, those from before a resume included."""
        return next((record for record in reversed(self.records) if record.get("event") == event), None)

    def close(self) -> None:
        """Flush to storage and close."""
        for stream in (self._metrics, self._log):
            if not stream.closed:
                with reported(self.folder):
                    os.fsync(stream.fileno())
                stream.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kept_records(self, keep_through: int | None) -> list[Record]:
        """The records of metrics.jsonl up to a step; all other lines leave the file."""
        path = self.folder / METRICS
        if not os.path.lexists(path):
            return []
        lines = read_regular(path).splitlines(keepends=True)
        records = [metrics_record(line) for line in lines]
        last = math.inf if keep_through is None else keep_through
        kept = [index for index, record in enumerate(records) if record and record["step"] <= last]
        if len(kept) < len(lines):
            write_file(path, b"".join(lines[index] for index in kept))
        if odd := sum(record is None for record in records[:-1]):
            self.text(f"{METRICS}: left out {odd} lines that are no records")
        return [record for record in records if record and record["step"] <= last]


def read_metrics(folder: Path) -> list[Record]:
    """Records of a run's metrics.jsonl in order; a torn last line is left out.

    Raises:
        RunError: there is no such file, or it is damaged before its last line.
    """
    path = folder / METRICS
    try:
        lines = read_regular(path).splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{folder} is not a run: it has no {METRICS}",
            remedy="give the folder of `prge run --out`",
            code="not-a-run",
        ) from None
    except OSError as error:
        raise RunError(
            f"{path} can't be read: {error.strerror}", remedy="give another run", code="run-unreadable"
        ) from None
    records = []
    for number, line in enumerate(lines, 1):
        record = metrics_record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise RunError(
                f"{path}: line {number} is damaged: no record of metrics",
                remedy="remove that line, or start a new run",
                code="metrics-damaged",
            )
    return records


def write_summary(
    folder: Path, run: Mapping[str, Any], train: Mapping[str, Any], meta: Mapping[str, Any] | None = None
) -> None:
    """Write run.json whole or not at all.

    Args:
        folder: the run folder.
        run: what was run: configuration, bundle hash, status.
        train: what came out: steps, seconds, rows, memory, final metrics.
        meta: where it ran; None for `environment()`.

    Raises:
        RunError: the storage is full, read-only or refuses.
    """
    content = _plain({"run": run, "train": train, "meta": environment() if meta is None else meta})
    write_file(folder / SUMMARY, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def environment() -> Record:
    """The `meta` block of run.json: versions, platform, processor, memory. Imports none of the packages."""
    return {
        "prge": _versions().get("prge"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count()},
        "memory_bytes": memory_info().get("MemTotal"),
        "versions": {name: _versions()[name] for name in _PACKAGES if name in _versions()},
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


@contextmanager
def run_lock(folder: Path) -> Iterator[int]:
    """Hold a run folder for this process; the operating system lets go of it when the process ends, however.

    The lock file stays, unless the block raises before it has made anything else in the folder. The block has
    its file descriptor: a child process that inherits it holds the folder, too.

    Raises:
        RunError: another process holds it, the folder can't be written, or the file of the lock is none.
    """
    with reported(folder):
        held = _hold(folder)
    with held.stream as stream:
        try:
            with reported(folder):
                stream.truncate(0)
                stream.write(f"{os.getpid()}\n".encode())
            yield stream.fileno()
        except BaseException:
            held.remove_new()
            raise


@dataclass(frozen=True)
class _Held:
    """A lock of a folder, what the folder held before it, and which folders were made for it."""

    folder: Path
    stream: BinaryIO
    before: Collection[str]
    made: Sequence[Path]

    def remove_new(self) -> None:
        """Remove the lock if it and nothing else is new in its folder, and then the folders that are new."""
        with suppress(OSError):
            if LOCK not in self.before and {*os.listdir(self.folder)} == {LOCK, *self.before}:
                (self.folder / LOCK).unlink()
                for path in self.made:
                    path.rmdir()


def _hold(folder: Path) -> _Held:
    """Create a folder if it doesn't exist, and lock it; raises as `run_lock`, and OSError."""
    for attempt in range(_ATTEMPTS):
        try:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            before = os.listdir(folder)
            stream = open_regular(folder / LOCK, "a+b", buffering=0)
            with ExitStack() as held:
                held.push(stream)
                stream.seek(0)
                if not _MADE_LOCK.fullmatch(stream.read(_LONGEST_HOLDER)):  # whose content would be lost
                    raise RunError(
                        f"{folder / LOCK} is no lock of prge",
                        remedy="give another folder",
                        code="lock-foreign",
                    )
                if not _lock(stream) and not _lock_after_end(stream):
                    break
                # Whoever held it may have removed it: two processes would lock two files of one name.
                if os.path.samestat(os.fstat(stream.fileno()), os.lstat(folder / LOCK)):
                    held.pop_all()
                    return _Held(folder, stream, before, made)
        except FileNotFoundError:  # another process has just removed the folder or its lock
            if attempt == _ATTEMPTS - 1:
                raise
    raise RunError(
        f"{folder} is in use by process {_holder_of(folder) or 'unknown'}",
        remedy="wait for it or stop it, or give another folder with --out",
        code="run-in-use",
    )


def _holder_of(folder: Path) -> str:
    with suppress(OSError), open_regular(folder / LOCK, "rb") as stream:
        return _holder(stream)
    return ""


def check_new_run(folder: Path, names: Iterable[str] = ()) -> None:
    """Refuse to begin a run in a folder that holds what no run wrote under a name that a run uses.

    Args:
        folder: without a run.
        names: that this kind of run uses beside the usual ones.

    Raises:
        RunError: there is such a file or folder, which the run would replace.
    """
    usual = (CONFIG, JOURNAL, METRICS, SAMPLES, LOG, SUMMARY, CHECKPOINTS, FINAL)
    there = [name for name in (*usual, *names) if os.path.lexists(folder / name)]
    if there:
        raise RunError(
            f"{folder} holds {there[0]}, which a run would replace",
            remedy="give a new or empty folder with --out",
            code="folder-occupied",
        )


def _holder(stream: BinaryIO) -> str:
    stream.seek(0)
    return stream.read(_LONGEST_HOLDER).decode(errors="replace").strip()


def _lock_after_end(stream: BinaryIO) -> bool:
    """Lock what a process that has ended held: a child that it had just forked lets go of it at once."""
    for _ in range(_LOOKS):
        try:
            os.kill(int(_holder(stream)), 0)
        except ProcessLookupError:
            time.sleep(_LOOK_SECONDS)
        except (ValueError, OverflowError, OSError):
            return False
        else:
            return False
        if _lock(stream):
            return True
    return False


def is_held(folder: Path) -> bool:
    """Whether a process holds a run folder. Changes nothing; False where that can't be known."""
    try:
        with open_regular(folder / LOCK, "rb") as stream:
            return not _lock(stream)
    except OSError:
        return False


def write_json(path: Path, content: Any) -> None:
    """Write what a verb found, for whoever reads it; raises RunError."""
    write_output(path, (json.dumps(content, indent=2) + "\n").encode())


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses inside the block into a RunError of its file, or of `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not the operating system's
            raise
        raise storage_error(Path(error.filename or path), error) from None


def _append(stream: BinaryIO, line: str) -> None:
    """Write a line; an unbuffered stream may take only a part of it, and says what is wrong the next time."""
    rest = memoryview(line.encode(errors="backslashreplace") + b"\n")
    while rest:
        rest = rest[stream.write(rest) :]


def metrics_record(line: bytes) -> Record | None:
    """A line of metrics.jsonl, if it is whole and a record: an event, its step, numbers where they belong."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("event"), str)
    if not whole or type(record.get("step")) is not int or not 0 <= record["step"] < _MOST:
        return None
    return record if all(_is_number(record.get(name)) for name in _NUMBERS) else None


def _is_number(value: Any) -> bool:
    """Whether plots can take a value: finite, or null for what was not."""
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        return False
    return value is None or abs(value) < _MOST


def _plain(value: Any) -> Any:
    """A value as JSON's own types; numpy scalars and arrays give their Python values, paths their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _lock(stream: BinaryIO) -> bool:
    """Lock an open file; False if another process has it. True also where files can't be locked."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    """Of the packages that are installed; looked up once, since that reads their metadata."""
    versions = {}
    for name in ("prge", *_PACKAGES):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _cpu_model() -> str:
    """The processor's name; on a phone the name of the chip."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for wanted in ("model name", "Hardware", "CPU part"):
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == wanted:
                return value.strip()
    return platform.processor() or "unknown"
