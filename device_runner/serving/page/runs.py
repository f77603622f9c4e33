"""Runs of a folder: which there are, how each goes on as a stream of events, and stopping one.

Names of runs are paths below the folder, in Unicode. What lies elsewhere, by a name or by a link, isn't
there.
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

from device_runner.serving.page.following import Followed, stamp_of
from device_runner.serving.page.static import words_of
from device_runner.serving.page.stopping import ask_to_stop, state_of
from device_runner.serving.protocol import Json, RequestError
from device_runner.session.sensors import Sensors
from prge.errors import RunError, printable, shown
from prge.files.documents import DocumentError, mapping, read_json
from prge.files.run_folder import CHECKPOINTS, CONFIG, FINAL, JOURNAL, LOCK, METRICS, SAMPLES, SUMMARY, Record

MOST_RUNS, MOST_ENTRIES, DEEPEST = 200, 10_000, 5
MOST_STREAMS = 16
SECONDS, SECONDS_TO_CATCH_UP = 1.0, 0.2
# Between two lines of a stream: who has left is noticed by one that can't be sent.
SECONDS_OF_SILENCE = 10.0
_MARKS = (JOURNAL, METRICS, SUMMARY)
_SECONDS_OF_TEMPERATURE = 10.0
_T = TypeVar("_T")


class Runs:
    """The runs below a folder, or the one that it is; asked by one event loop, looked at by one thread.

    Args:
        root: the folder.

    Raises:
        RunError: there is no such folder.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise RunError(
                f"{root} is no folder",
                remedy="give a run, or a folder with runs in it",
                code="folder-missing",
            )
        self._root = root.resolve()
        self._thread = ThreadPoolExecutor(1, "runs")
        self._sensors = Sensors()
        self._temperature: tuple[float, float | None] = (0.0, None)
        # By folder; with how many streams tell of it.
        self._followed: dict[Path, tuple[Followed, int]] = {}
        self._asked: set[tuple[Path, int]] = set()
        # What run.json told when it was written so.
        self._told_statuses: dict[Path, tuple[object, object]] = {}
        self._closed = False

    def close(self) -> None:
        """End all streams soon."""
        self._closed = True

    async def listed(self) -> Json:
        """All runs, the newest first; `cut` where there are more than are looked for."""
        return await self._apart(self._list)

    def at(self, name: str) -> Path:
        """The folder of a run by its name; raises RequestError."""
        folder = self._found(self._root / name)
        if folder is None:
            raise RequestError(404, f"there is no run {shown(name)}", param="run", code="run_not_found")
        return folder

    async def stop(self, name: str) -> None:
        """Ask a run to end after its step; raises RequestError where that can't be."""
        await self._apart(lambda: self._stop(name))

    def _stop(self, name: str) -> None:
        folder = self.at(name)
        is_running, process = state_of(folder)
        problem = ""
        if not is_running:
            problem = "isn't running"
        elif process is None:
            problem = "can't be stopped from here: press Ctrl-C where it runs"
        elif (folder, process) in self._asked:
            # A second signal would end the run at once.
            problem = "was asked before, and ends after its step"
        elif _status(folder) != "running":
            # A signal would end it before there is anything to go on from.
            problem = "takes no step yet: try again later"
        elif not ask_to_stop(process):
            problem = "isn't running"
        if problem or process is None:
            raise RequestError(409, f"{name} {problem}", param="run", code="run_not_stopped")
        self._asked.add((folder, process))

    async def follow(self, name: str, language: str) -> tuple[AsyncIterator[str], Callable[[], None]]:
        """Events that tell of a run whenever something is new, and what to call when nobody reads them.

        Raises:
            RequestError: there is no such run, or there are too many streams.
        """
        folder = await self._apart(lambda: self.at(name))
        if sum(users for _, users in self._followed.values()) >= MOST_STREAMS:
            raise RequestError(
                429, f"at most {MOST_STREAMS} pages look at runs at once: close one", kind="rate_limit_error"
            )
        followed, users = self._followed.get(folder) or (Followed(folder, self._celsius), 0)
        self._followed[folder] = followed, users + 1

        def leave() -> None:
            _, users = self._followed.pop(folder)
            if users > 1:
                self._followed[folder] = followed, users - 1

        return self._events(followed, language), leave

    async def _events(self, followed: Followed, language: str) -> AsyncIterator[str]:
        def look() -> str:
            # The folder may have gone since, or be a link by now.
            is_there = self._found(followed.folder) == followed.folder
            return json.dumps(followed.told(language, words_of(language))) if is_there else ""

        before, told_at = "", time.monotonic()
        while not self._closed:
            told = await self._apart(look)
            if not told:
                return
            if told != before:
                before, told_at = told, time.monotonic()
                yield f"data: {told}\n\n"
            elif time.monotonic() - told_at > SECONDS_OF_SILENCE:
                told_at = time.monotonic()
                yield ": nothing new\n\n"
            await asyncio.sleep(SECONDS_TO_CATCH_UP if followed.has_more else SECONDS)

    def _found(self, path: Path) -> Path | None:
        """The folder of a run that a path leads to, below the root."""
        with suppress(OSError, ValueError, RuntimeError):
            folder = path.resolve()
            if folder.is_relative_to(self._root) and _is_run(folder):
                return folder
        return None

    async def _apart(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _celsius(self) -> float | None:
        """Temperature of this machine; asking a phone takes a while."""
        read_at, value = self._temperature
        if not read_at or time.monotonic() - read_at > _SECONDS_OF_TEMPERATURE:
            reading = self._sensors.temperature().value
            value = None if reading is None else float(reading)
            self._temperature = time.monotonic(), value
        return value

    def _list(self) -> Json:
        entries = [MOST_ENTRIES]
        found = sorted(_runs_in(self._root, DEEPEST, entries), key=_written, reverse=True)
        told = [self._told(folder) for folder in found[:MOST_RUNS]]
        self._told_statuses = {folder: self._told_statuses[folder] for folder in found[:MOST_RUNS]}
        is_cut = len(found) > MOST_RUNS or entries[0] <= 0
        return {"object": "list", "data": told, "cut": is_cut}

    def _told(self, folder: Path) -> Record:
        name = folder.relative_to(self._root).as_posix()
        stamp = stamp_of(folder / SUMMARY)
        read_at, status = self._told_statuses.get(folder, (None, None))
        if stamp is None or stamp != read_at:
            status = _status(folder)
        self._told_statuses[folder] = stamp, status
        is_running, _ = state_of(folder)
        ended = "killed" if status in (None, "running") else str(status)[:40]
        return {
            "run": name,
            "name": printable(self._root.name) if name == "." else name,
            "status": "running" if is_running else ended,
        }


def _runs_in(folder: Path, depth: int, entries: list[int]) -> Iterator[Path]:
    """Runs below a folder, which is one itself or none; `entries` is how many are looked at still."""
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
        # By bytes that are no text no browser could ask.
        is_text = entry.name == entry.name.encode(errors="ignore").decode()
        is_other = entry.name.startswith(".") or entry.name in (CHECKPOINTS, FINAL)
        if depth and is_text and not is_other:
            yield from _runs_in(Path(entry.path), depth - 1, entries)


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run's, and none of its files is a link, which may lead elsewhere."""
    is_linked = any((folder / name).is_symlink() for name in (*_MARKS, CONFIG, LOCK, SAMPLES))
    return not is_linked and any((folder / name).is_file() for name in _MARKS)


def _status(folder: Path) -> object:
    """What a run's summary says of how it stands; None without one."""
    try:
        return mapping(mapping(read_json(folder / SUMMARY)).get("run")).get("status")
    except (OSError, DocumentError):
        return None


def _written(folder: Path) -> float:
    """When something of a run was written last."""
    times = [0.0]
    for name in _MARKS:
        try:
            times.append((folder / name).lstat().st_mtime)
        except OSError:
            continue
    return max(times)
