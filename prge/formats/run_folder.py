"""Run folders: the names of their files, and the metrics, the log, the summary and the lock of a run."""

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
from prge.system.atomic import storage_error, write_file, write_output
from prge.system.memory import PeakMemory, memory_info
from prge.system.regular_files import open_regular, read_regular

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
# Statuses of runs with a result, and of runs that can't continue.
FINISHED = ("completed", "stopped early")
ENDED = (*FINISHED, "diverged")
# The decisions of `prge tune`, in its folder: `decisions` is a list of {name, value, why}.
DECISIONS = "tune.json"

_PACKAGES = ("numpy", "safetensors", "tokenizers", "torch", "executorch", "torchao", "transformers", "peft")

Record = dict[str, Any]

# Numeric fields of metrics.jsonl that charts and resumed runs use.
_NUMBERS = (
    "loss",
    "value",
    "forward_passes",
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
    "reward",
    "solved",
    "completion_tokens",
    "completion_length",
    "kl",
)
_MAX_NUMBER = 1e300
# A lock file contains the id of the process that holds it, or nothing.
_LONGEST_HOLDER = 20
_LOCK_CONTENT = re.compile(rb"\d*\n?")
# Attempts to lock a folder that other processes remove at the same time.
_ATTEMPTS = 50
# Attempts to take the lock of a process that has ended, and the time before each.
_RETRIES, _RETRY_SECONDS = 40, 0.05


class RunLog:
    """The files metrics.jsonl and log.txt of a run folder, opened for appending.

    Every line is passed to the operating system before the call returns: a killed run loses at most the line
    that it was writing.

    Attributes:
        folder: the run folder.
        memory: the peak memory of the process.
        records: the records of metrics.jsonl.
    """

    def __init__(self, folder: Path, keep_through: int | None = None) -> None:
        """Open both files; create the folder if it doesn't exist.

        Args:
            folder: the run folder.
            keep_through: when a run is resumed, the last step whose records are kept; None: all. Incomplete
                and invalid lines are always removed.

        Raises:
            RunError: the folder can't be written, or one of the files is a link, a pipe or a device.
        """
        self.folder = folder
        self.memory = PeakMemory()
        with as_run_error(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # private, because its log quotes rows
            self._log = open_regular(folder / LOG, "ab", buffering=0)
            self.records = self._kept_records(keep_through)
            self._metrics = open_regular(folder / METRICS, "ab", buffering=0)

    def metric(self, record: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl; infinite numbers and NaN are written as null."""
        plain = _plain(record)
        with as_run_error(self.folder):
            _append(self._metrics, json.dumps(plain, allow_nan=False))
        self.records.append(plain)
        self.memory.sample()

    def text(self, line: str) -> None:
        """Append a line to log.txt, with the time."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with as_run_error(self.folder):
            _append(self._log, f"{now} {line}")

    def last(self, event: str) -> Record | None:
        """Return the newest record of an event, including records from before a resume."""
        return next((record for record in reversed(self.records) if record.get("event") == event), None)

    def close(self) -> None:
        """Flush the files to storage and close them."""
        for stream in (self._metrics, self._log):
            if not stream.closed:
                with as_run_error(self.folder):
                    os.fsync(stream.fileno())
                stream.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kept_records(self, keep_through: int | None) -> list[Record]:
        """Return the records of metrics.jsonl up to a step, and remove all other lines from the file."""
        path = self.folder / METRICS
        if not os.path.lexists(path):
            return []
        lines = read_regular(path).splitlines(keepends=True)
        records = [metrics_record(line) for line in lines]
        last = math.inf if keep_through is None else keep_through
        kept = [index for index, record in enumerate(records) if record and record["step"] <= last]
        if len(kept) < len(lines):
            write_file(path, b"".join(lines[index] for index in kept))
        if invalid := sum(record is None for record in records[:-1]):
            self.text(f"{METRICS}: left out {invalid} lines that are not records")
        return [record for record in records if record and record["step"] <= last]


def read_metrics(folder: Path) -> list[Record]:
    """Read the records of a run's metrics.jsonl, in order, without an incomplete last line.

    Raises:
        RunError: the file doesn't exist, can't be read, or is damaged before its last line.
    """
    path = folder / METRICS
    try:
        lines = read_regular(path).splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{folder} is not a run: it has no {METRICS}.",
            remedy="Give the folder of `prge run --out`.",
            code="not-a-run",
        ) from None
    except OSError as error:
        raise RunError(
            f"{path} can't be read: {error.strerror}", remedy="Give another run.", code="run-unreadable"
        ) from None
    records = []
    for number, line in enumerate(lines, 1):
        record = metrics_record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise RunError(
                f"{path}: line {number} is damaged: no record of metrics.",
                remedy="Remove that line, or start a new run.",
                code="metrics-damaged",
            )
    return records


def write_summary(
    folder: Path, run: Mapping[str, Any], train: Mapping[str, Any], meta: Mapping[str, Any] | None = None
) -> None:
    """Write run.json atomically.

    Args:
        folder: the run folder.
        run: the block `run`: settings, bundle hash, status.
        train: the block `train`: steps, seconds, rows, memory, final metrics.
        meta: the block `meta`; default: `environment()`.

    Raises:
        RunError: the file can't be written.
    """
    content = _plain({"run": run, "train": train, "meta": environment() if meta is None else meta})
    write_file(folder / SUMMARY, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def environment() -> Record:
    """Return the block `meta` of run.json: versions, platform, processor, memory; imports no packages."""
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
    """Lock a run folder for this process; the operating system releases the lock when the process ends.

    The lock file remains, unless the block raises before it has created anything else in the folder.

    Yields:
        The file descriptor of the lock: a child process that inherits it holds the lock, too.

    Raises:
        RunError: another process holds the lock, the folder can't be written, or the file isn't a lock of
            prge.
    """
    with as_run_error(folder):
        held = _hold(folder)
    with held.stream as stream:
        try:
            with as_run_error(folder):
                stream.truncate(0)
                stream.write(f"{os.getpid()}\n".encode())
            yield stream.fileno()
        except BaseException:
            held.remove_new()
            raise


@dataclass(frozen=True)
class _Held:
    """A lock that is held.

    Attributes:
        folder: the locked folder.
        stream: the lock file.
        before: names in the folder before it was locked.
        created: the folder and its parents, as far as they were created for the lock.
    """

    folder: Path
    stream: BinaryIO
    before: Collection[str]
    created: Sequence[Path]

    def remove_new(self) -> None:
        """Remove the lock file and the created folders, if nothing else was created in the folder."""
        with suppress(OSError):
            if LOCK not in self.before and {*os.listdir(self.folder)} == {LOCK, *self.before}:
                (self.folder / LOCK).unlink()
                for path in self.created:
                    path.rmdir()


def _hold(folder: Path) -> _Held:
    """Create a folder if it doesn't exist, and lock it; raises RunError, see `run_lock`, and OSError."""
    for attempt in range(_ATTEMPTS):
        try:
            created = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            before = os.listdir(folder)
            stream = open_regular(folder / LOCK, "a+b", buffering=0)
            with ExitStack() as held:
                held.push(stream)
                stream.seek(0)
                if not _LOCK_CONTENT.fullmatch(stream.read(_LONGEST_HOLDER)):  # its content would be lost
                    raise RunError(
                        f"{folder / LOCK} is not a lock of prge.",
                        remedy="Give another folder.",
                        code="lock-foreign",
                    )
                if not _lock(stream) and not _lock_after_end(stream):
                    break
                # The former holder may have removed the file: two processes could lock two files.
                if os.path.samestat(os.fstat(stream.fileno()), os.lstat(folder / LOCK)):
                    held.pop_all()
                    return _Held(folder, stream, before, created)
        except FileNotFoundError:  # another process has just removed the folder or its lock
            if attempt == _ATTEMPTS - 1:
                raise
    raise RunError(
        f"{folder} is in use by process {_holder_of(folder) or 'unknown'}.",
        remedy="Wait for it or stop it, or give another folder with --out.",
        code="run-in-use",
    )


def _holder_of(folder: Path) -> str:
    with suppress(OSError), open_regular(folder / LOCK, "rb") as stream:
        return _holder(stream)
    return ""


def check_new_run(folder: Path, names: Iterable[str] = ()) -> None:
    """Raise RunError if a folder without a run has a file or folder whose name a run uses.

    Args:
        folder: a folder without a run.
        names: further names that this run uses.

    Raises:
        RunError: there is such a file or folder, which the run would replace.
    """
    run_names = (CONFIG, JOURNAL, METRICS, SAMPLES, LOG, SUMMARY, CHECKPOINTS, FINAL)
    existing = [name for name in (*run_names, *names) if os.path.lexists(folder / name)]
    if existing:
        raise RunError(
            f"{folder} holds {existing[0]}, which a run would replace.",
            remedy="Give a new or empty folder with --out.",
            code="folder-occupied",
        )


def _holder(stream: BinaryIO) -> str:
    stream.seek(0)
    return stream.read(_LONGEST_HOLDER).decode(errors="replace").strip()


def _lock_after_end(stream: BinaryIO) -> bool:
    """Lock a file whose holder has ended but whose lock a forked child may hold for a moment."""
    for _ in range(_RETRIES):
        try:
            os.kill(int(_holder(stream)), 0)
        except ProcessLookupError:
            time.sleep(_RETRY_SECONDS)
        except (ValueError, OverflowError, OSError):
            return False
        else:
            return False
        if _lock(stream):
            return True
    return False


def is_held(folder: Path) -> bool:
    """Return whether a process holds the lock of a run folder; False if that can't be determined."""
    try:
        with open_regular(folder / LOCK, "rb") as stream:
            return not _lock(stream)
    except OSError:
        return False


def write_json(path: Path, content: Any) -> None:
    """Write the result of a verb as JSON; raises RunError."""
    write_output(path, (json.dumps(content, indent=2) + "\n").encode())


@contextmanager
def as_run_error(path: Path) -> Iterator[None]:
    """Convert an OSError inside the block into a RunError that names its file, or `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not from the operating system
            raise
        raise storage_error(Path(error.filename or path), error) from None


def _append(stream: BinaryIO, line: str) -> None:
    """Write a line completely; a single write to an unbuffered stream may be partial."""
    rest = memoryview(line.encode(errors="backslashreplace") + b"\n")
    while rest:
        rest = rest[stream.write(rest) :]


def metrics_record(line: bytes) -> Record | None:
    """Parse a line of metrics.jsonl; return None if it is incomplete or isn't a valid record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_complete = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("event"), str)
    if not is_complete or type(record.get("step")) is not int or not 0 <= record["step"] < _MAX_NUMBER:
        return None
    return record if all(_is_number(record.get(name)) for name in _NUMBERS) else None


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number of a plausible size, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        return False
    return value is None or abs(value) < _MAX_NUMBER


def _plain(value: Any) -> Any:
    """Convert a value to JSON's types: numpy scalars and arrays to Python values, paths to strings."""
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
    """Lock an open file; return False if another process holds it, True also if locks aren't supported."""
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
    """Return the versions of the installed packages; cached, because it reads their metadata."""
    versions = {}
    for name in ("prge", *_PACKAGES):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _cpu_model() -> str:
    """Return the name of the processor; on a phone, of the chip."""
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
