"""The backend's packed weights in files: mapped instead of held, and ready at the next start.

    ~/.cache/prge/packed/<hash>            for one program and one weights file
    ~/.cache/prge/packed/<hash>.checksum   of its content, which the engine itself doesn't check
    ~/.cache/prge/packed/<hash>.weights    which weights file had the hash when it was last compared

The hash is of what the content follows from: program, weights, engine build, processor. So no two blocks
share a file, and one from another machine is never found. XDG_CACHE_HOME moves the folder.

A file is made by a process of its own, which loads every method of the program: what is loaded from a file
never grows it. It appears when it is whole and its methods gave the answers that they give without it.

The engine takes what it doesn't pack, such as a table of embeddings, from the weights file at every start.
Its hash is compared at the first one, and whenever the system tells of another file or a change since.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from device_runner.engines.child_check import check_in_child
from device_runner.engines.native.runtime import (
    Arena,
    Program,
    WeightsFile,
    backend_sha256,
    without_threads,
)
from device_runner.engines.refusals import RefusedError
from prge.engine import Array
from prge.errors import BundleError, PrgeError
from prge.files.bundle import file_sha256
from prge.host.atomic import flush_folder, storage_error, write_file
from prge.host.regular_files import open_regular, read_regular
from prge.host.user_cache import PACKED, user_cache

_CHECKSUM, _COMPARED = ".checksum", ".weights"
_LOCK = "lock"
# Making one takes seconds; a process that waits longer goes on without.
WAIT_SECONDS = 60.0
_PIECE_BYTES = 1 << 20


class HashedFile(NamedTuple):
    """A file of a bundle and the hash that its manifest has for it."""

    path: Path
    sha256: str


class PackedFiles:
    """The packed files of this device.

    Args:
        tell: called once at most, with the reason why weights stay in memory.
        folder: where the files lie; by default the user's cache.

    Raises:
        EngineError: the engine's libraries can't be had.
    """

    def __init__(self, tell: Callable[[str], None], folder: Path | None = None) -> None:
        self._tell = tell
        self._folder = user_cache(PACKED) if folder is None else folder
        self._machine = f"{backend_sha256()}\n{_processor()}"
        self._refused = False
        self._ready: dict[Path, bool] = {}

    def open(
        self, program: HashedFile, weights: HashedFile, probes: Mapping[str, Sequence[Array]]
    ) -> WeightsFile:
        """A weights file for a program, with its packed file where that can be had.

        A missing one is made, a damaged one is made again, each before the first use in this process. What
        stands against that is told, and the weights stay in memory.

        Args:
            program: methods for a kind of block.
            weights: constants of one block.
            probes: inputs for methods whose answers must not change.

        Raises:
            BundleError: the weights file is not the one of its hash.
            BundleError, EngineError: the engine refuses the weights file or aborts on it.
        """
        path = self._folder / self._name(program, weights)
        if path not in self._ready:
            self._ready[path] = self._prepared(path, program, weights, probes)
        if self._ready[path]:
            try:
                return WeightsFile(weights.path, path)
            except RefusedError as error:  # gone or locked since
                self._ready[path] = False
                self._refuse(f"{path}: {error}")
        # The engine doesn't verify the tables of a weights file; that of a packed file was opened in a child.
        check_in_child(weights.path, lambda: WeightsFile(weights.path))
        return WeightsFile(weights.path)

    def _prepared(
        self, path: Path, program: HashedFile, weights: HashedFile, probes: Mapping[str, Sequence[Array]]
    ) -> bool:
        """Whether the packed file is there and whole, made now unless it is."""
        compared, identity = path.with_name(path.name + _COMPARED), _identity(weights.path)
        is_whole = _is_whole(path)
        if is_whole and _content(compared) == identity:
            return True
        _check_content(weights)
        if self._refused and not is_whole:
            return False
        try:
            if not is_whole:
                self._folder.mkdir(parents=True, exist_ok=True)
                with _locked(self._folder):
                    if not _is_whole(path):  # while this process waited, another one may have made it
                        _make(path, program.path, weights.path, probes)
            with contextlib.suppress(PrgeError):  # else the next start compares again
                write_file(compared, identity)
            return True
        except OSError as error:
            self._refuse(storage_error(self._folder, error).what)
        except PrgeError as error:
            self._refuse(error.what)
        return False

    def _name(self, program: HashedFile, weights: HashedFile) -> str:
        facts = f"{program.sha256}\n{weights.sha256}\n{self._machine}"
        return hashlib.sha256(facts.encode()).hexdigest()[:32]

    def _refuse(self, reason: str) -> None:
        if not self._refused:
            self._tell(f"weights stay in memory instead of packed files: {reason}")
        self._refused = True


def bytes_in(folder: Path) -> int:
    """What the files of a folder take on the storage."""
    return sum(path.stat().st_size for path in files_in(folder))


def remove_files(folder: Path) -> int:
    """Remove what lies in a folder of the cache; gives its bytes. Processes that use a file keep it until
    they end.

    Raises:
        RunError: the storage refuses, or another process is making one all the time.
    """
    if not folder.is_dir():
        return 0
    try:
        with _locked(folder):
            removed = bytes_in(folder)
            for path in files_in(folder):
                path.unlink()
            return removed
    except OSError as error:
        raise storage_error(folder, error) from None


def files_in(folder: Path) -> list[Path]:
    """What lies in a folder of the cache, with checksums; none where there is no folder."""
    return [path for path in sorted(folder.glob("*")) if path.name != _LOCK and path.is_file()]


def _processor() -> str:
    """What decides which kernels the engine chooses, and with them the form of packed weights."""
    names = (
        "model name",
        "flags",
        "Features",
        "CPU implementer",
        "CPU architecture",
        "CPU variant",
        "CPU part",
    )
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join([platform.machine(), *sorted({line for line in lines if line.startswith(names)})])


def _check_content(file: HashedFile) -> None:
    try:
        found = file_sha256(file.path)
    except OSError as error:
        raise BundleError(
            f"{file.path} can't be read: {error.strerror or error}",
            remedy="copy or export the bundle again",
            code="file-unreadable",
        ) from None
    if found != file.sha256:
        raise BundleError(
            f"{file.path} is not the file that the manifest describes",
            remedy="copy or export the bundle again",
            code="bundle-file-hash",
        )


def _identity(path: Path) -> bytes:
    """What the system tells of a file and changes with its content; empty where it can't be read."""
    try:
        facts = path.stat()
    except OSError:
        return b""
    return f"{facts.st_dev} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}\n".encode()


def _content(path: Path) -> bytes | None:
    try:
        return read_regular(path)
    except OSError:
        return None


def _is_whole(path: Path) -> bool:
    """Whether a packed file has the checksum beside it."""
    try:
        return _content(path.with_name(path.name + _CHECKSUM)) == _checksum(path, path.name)
    except OSError:
        return False


def _checksum(path: Path, name: str) -> bytes:
    """Of a file's content under its name, against damage.

    Every start reads the whole file for it; this is 8 times as fast as SHA-256.
    """
    value, size = zlib.crc32(name.encode()), 0
    with open_regular(path, "rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            value = zlib.crc32(piece, value)
            size += len(piece)
    return f"{value:08x} {size}\n".encode()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change the files of a folder; its end, of any kind, lets the next one in."""
    deadline = time.monotonic() + WAIT_SECONDS
    with open_regular(folder / _LOCK, "wb") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, "another process is making packed files") from None
                time.sleep(0.02)
        yield


def _make(path: Path, program: Path, weights: Path, probes: Mapping[str, Sequence[Array]]) -> None:
    """Make a packed file, in the only process that does so now."""
    partial = path.with_name(path.name + ".partial")
    checksum = path.with_name(path.name + _CHECKSUM)
    try:
        for old in (path, checksum, partial):  # what a killed process left, or damage
            old.unlink(missing_ok=True)
        _ask_for_room(partial, weights.stat().st_size)
        check_in_child(weights, lambda: _pack(partial, program, weights, probes))
        content = _checksum(partial, path.name)
        os.replace(partial, path)
        flush_folder(path.parent)
        write_file(checksum, content)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _ask_for_room(path: Path, weights_bytes: int) -> None:
    """Fail now if the storage has no room: the engine writes to mapped pages, so a signal would end it."""
    with open_regular(path, "wb") as stream:
        # Packing pads rows of weights and begins each weight on a page of its own.
        os.posix_fallocate(stream.fileno(), 0, weights_bytes * 5 // 4 + (1 << 20))
        os.ftruncate(stream.fileno(), 0)


def _pack(path: Path, program: Path, weights: Path, probes: Mapping[str, Sequence[Array]]) -> None:
    """Write a packed file, in a forked child.

    Raises:
        RefusedError: the engine can't, or the methods' answers would change.
    """
    without_threads()
    methods = Program(program)
    arena = Arena(max(map(methods.arena_bytes, methods.methods)))

    def answers(opened: WeightsFile) -> list[bytes]:
        return [
            answer
            for name, inputs in probes.items()
            for answer in _answers(methods, name, inputs, opened, arena)
        ]

    want = answers(WeightsFile(weights))
    packing = WeightsFile(weights, path, packing=True)
    # Together: a method that is alone reads what the one before it wrote, and adds nothing.
    loaded = [methods.load(name, weights=packing, arena=arena) for name in methods.methods]
    del loaded
    if answers(WeightsFile(weights, path)) != want:
        raise RefusedError("its answers change when its weights are packed to a file")


def _answers(
    program: Program, name: str, inputs: Sequence[Array], weights: WeightsFile, arena: Arena
) -> list[bytes]:
    outputs = [np.empty(spec.sizes, spec.dtype) for spec in program.signature(name).outputs if spec]
    shapes = program.load(name, weights=weights, arena=arena).run(inputs, outputs)
    return [
        output.reshape(-1)[: int(np.prod(shape))].tobytes()
        for output, shape in zip(outputs, shapes, strict=True)
    ]
