"""The runs below a folder: list them, stream their progress as events, and stop them.

Names of runs are paths below the folder, as Unicode text. Anything outside the folder, by name or by a link,
does not exist.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from device_runner.serving.page.static import translator
from device_runner.serving.page.stopping import ask_to_stop, process_state
from device_runner.serving.page.tail import RunFollower, file_stamp
from device_runner.serving.protocol import Json, RequestError
from device_runner.session.sensors import Sensors
from prge.errors import RunError, format_value, printable
from prge.formats.documents import DocumentError, mapping, read_json
from prge.formats.run_folder import (
    CHECKPOINTS,
    CONFIG,
    FINAL,
    JOURNAL,
    LOCK,
    METRICS,
    SAMPLES,
    SUMMARY,
    Record,
)

MAX_RUNS, MAX_ENTRIES, DEEPEST = 200, 10_000, 5
MAX_STREAMS = 16
SECONDS, SECONDS_TO_CATCH_UP = 1.0, 0.2
# Longest silence of a stream: a line that can't be sent shows that the client is gone.
SECONDS_OF_SILENCE = 10.0
_MARKS = (JOURNAL, METRICS, SUMMARY)
_SECONDS_OF_TEMPERATURE = 10.0
_T = TypeVar("_T")


class Runs:
    """The runs below a folder, or the one run that it is; called by one event loop, reads in one thread.

    Args:
        root: the folder.

    Raises:
        RunError: there is no such folder.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise RunError(
                f"{root} is not a folder.",
                remedy="Give a run, or a folder with runs.",
                code="folder-missing",
            )
        self._root = root.resolve()
        self._thread = ThreadPoolExecutor(1, "runs")
        self._sensors = Sensors()
        self._temperature: tuple[float, float | None] = (0.0, None)
        # Followed runs by folder, with their numbers of streams.
        self._followed: dict[Path, tuple[RunFollower, int]] = {}
        self._stop_requests: set[tuple[Path, int]] = set()
        # Status by folder, with the stamp of the run.json that it was read from.
        self._statuses: dict[Path, tuple[object, object]] = {}
        self._closed = False

    def close(self) -> None:
        """End all streams soon."""
        self._closed = True

    async def list_runs(self) -> Json:
        """Return all runs, the newest first; `cut` says whether there are more than the limit."""
        return await self._run_in_thread(self._list)

    def folder_of(self, name: str) -> Path:
        """Return the folder of a run by its name; raises RequestError if there is none."""
        folder = self._resolve_run(self._root / name)
        if folder is None:
            raise RequestError(
                404, f"there is no run {format_value(name)}", param="run", code="run_not_found"
            )
        return folder

    async def stop(self, name: str) -> None:
        """Ask a run to stop after its step; raises RequestError if it can't be asked."""
        await self._run_in_thread(lambda: self._stop(name))

    def _stop(self, name: str) -> None:
        folder = self.folder_of(name)
        is_running, process = process_state(folder)
        problem = ""
        if not is_running:
            problem = "is not running"
        elif process is None:
            problem = "can't be stopped from here: press Ctrl-C in its terminal"
        elif (folder, process) in self._stop_requests:
            # A second signal would end the run at once, in the middle of a step.
            problem = "was already asked to stop, and stops after its step"
        elif _status(folder) != "running":
            # A signal would end the run before there is a checkpoint to resume from.
            problem = "has not started its first step: try again later"
        elif not ask_to_stop(process):
            problem = "is not running"
        if problem or process is None:
            raise RequestError(409, f"{name} {problem}", param="run", code="run_not_stopped")
        self._stop_requests.add((folder, process))

    async def follow(self, name: str, language: str) -> tuple[AsyncIterator[str], Callable[[], None]]:
        """Return a stream of a run's progress as events, and a function to call when nobody reads it.

        Raises:
            RequestError: there is no such run, or there are too many streams.
        """
        folder = await self._run_in_thread(lambda: self.folder_of(name))
        if sum(users for _, users in self._followed.values()) >= MAX_STREAMS:
            raise RequestError(
                429,
                f"at most {MAX_STREAMS} pages can watch runs at once: close one",
                error_type="rate_limit_error",
            )
        followed, users = self._followed.get(folder) or (RunFollower(folder, self._celsius), 0)
        self._followed[folder] = followed, users + 1

        def leave() -> None:
            _, users = self._followed.pop(folder)
            if users > 1:
                self._followed[folder] = followed, users - 1

        return self._events(followed, language), leave

    async def _events(self, followed: RunFollower, language: str) -> AsyncIterator[str]:
        def read_snapshot() -> str:
            # The folder may have been deleted or replaced by a link.
            is_there = self._resolve_run(followed.folder) == followed.folder
            return json.dumps(followed.snapshot(language, translator(language))) if is_there else ""

        sent, sent_at = "", time.monotonic()
        while not self._closed:
            snapshot = await self._run_in_thread(read_snapshot)
            if not snapshot:
                return
            if snapshot != sent:
                sent, sent_at = snapshot, time.monotonic()
                yield f"data: {snapshot}\n\n"
            elif time.monotonic() - sent_at > SECONDS_OF_SILENCE:
                sent_at = time.monotonic()
                yield ": nothing new\n\n"
            await asyncio.sleep(SECONDS_TO_CATCH_UP if followed.has_more else SECONDS)

    def _resolve_run(self, path: Path) -> Path | None:
        """Return the run's folder that a path leads to, if it is below the root."""
        with suppress(OSError, ValueError, RuntimeError):
            folder = path.resolve()
            if folder.is_relative_to(self._root) and _is_run(folder):
                return folder
        return None

    async def _run_in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _celsius(self) -> float | None:
        """Return the temperature of this machine; cached, because reading it may take a while."""
        read_at, value = self._temperature
        if not read_at or time.monotonic() - read_at > _SECONDS_OF_TEMPERATURE:
            reading = self._sensors.temperature().value
            value = None if reading is None else float(reading)
            self._temperature = time.monotonic(), value
        return value

    def _list(self) -> Json:
        entries = [MAX_ENTRIES]
        folders = sorted(_runs_in(self._root, DEEPEST, entries), key=_written, reverse=True)
        listed_runs = [self._describe(folder) for folder in folders[:MAX_RUNS]]
        self._statuses = {folder: self._statuses[folder] for folder in folders[:MAX_RUNS]}
        is_cut = len(folders) > MAX_RUNS or entries[0] <= 0
        return {"object": "list", "data": listed_runs, "cut": is_cut}

    def _describe(self, folder: Path) -> Record:
        name = folder.relative_to(self._root).as_posix()
        stamp = file_stamp(folder / SUMMARY)
        read_at, status = self._statuses.get(folder, (None, None))
        if stamp is None or stamp != read_at:
            status = _status(folder)
        self._statuses[folder] = stamp, status
        is_running, _ = process_state(folder)
        ended = "killed" if status in (None, "running") else str(status)[:40]
        return {
            "run": name,
            "name": printable(self._root.name) if name == "." else name,
            "status": "running" if is_running else ended,
        }


def _runs_in(folder: Path, depth: int, entries: list[int]) -> Iterator[Path]:
    """Yield runs below a folder, or the folder itself.

    Args:
        folder: the folder to search.
        depth: levels of folders below it.
        entries: one number that counts down the entries that may still be visited.
    """
    if _is_run(folder):
        yield folder
        return
    try:
        with os.scandir(folder) as scanned:
            below = [entry for entry in scanned if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for entry in below:
        entries[0] -= 1
        if entries[0] <= 0:
            return
        # A browser can't ask for a name that is not valid Unicode.
        is_text = entry.name == entry.name.encode(errors="ignore").decode()
        is_other = entry.name.startswith(".") or entry.name in (CHECKPOINTS, FINAL)
        if depth and is_text and not is_other:
            yield from _runs_in(Path(entry.path), depth - 1, entries)


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run's, and none of its files is a link, which could lead elsewhere."""
    is_linked = any((folder / name).is_symlink() for name in (*_MARKS, CONFIG, LOCK, SAMPLES))
    return not is_linked and any((folder / name).is_file() for name in _MARKS)


def _status(folder: Path) -> object:
    """Return the status in a run's summary; None without one."""
    try:
        return mapping(mapping(read_json(folder / SUMMARY)).get("run")).get("status")
    except (OSError, DocumentError):
        return None


def _written(folder: Path) -> float:
    """Return when a run was last written."""
    times = [0.0]
    for name in _MARKS:
        try:
            times.append((folder / name).lstat().st_mtime)
        except OSError:
            continue
    return max(times)
