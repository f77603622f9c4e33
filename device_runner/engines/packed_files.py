"""Packed weights of the XNNPACK backend in files, mapped instead of held and ready at the next start.

    ~/.cache/prge/packed/<hash>            packed weights of one program and one weights file
    ~/.cache/prge/packed/<hash>.checksum   checksum of its content, which the engine itself doesn't check
    ~/.cache/prge/packed/<hash>.weights    identity of the weights file whose hash was last compared

The hash covers everything that determines the content: program, weights, engine build, processor. So no two
blocks share a file, and a file of another machine is never used. XDG_CACHE_HOME moves the folder.

A process of its own makes a file and loads every method of the program: methods that read a file never extend
it. The file appears when it is complete and its methods return the same outputs as without it.

The engine reads constants that it doesn't pack, such as an embedding table, from the weights file at every
start. The hash of the weights file is compared on first use, and whenever its identity has changed since.
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
from device_runner.engines.errors import EngineRefusalError
from device_runner.engines.native.runtime import (
    Arena,
    Program,
    WeightsFile,
    backend_sha256,
    without_threads,
)
from prge.engine import Array
from prge.errors import BundleError, PrgeError, as_clause
from prge.formats.bundle import file_sha256
from prge.system.atomic import flush_folder, storage_error, write_file
from prge.system.regular_files import open_regular, read_regular
from prge.system.user_cache import PACKED, user_cache

_CHECKSUM, _COMPARED = ".checksum", ".weights"
_LOCK = "lock"
# Making a file takes seconds; a process that waits longer continues without packed weights.
WAIT_SECONDS = 60.0
_CHUNK_BYTES = 1 << 20


class HashedFile(NamedTuple):
    """A file of a bundle and its hash in the manifest."""

    path: Path
    sha256: str


class PackedFiles:
    """The packed files of this device.

    Args:
        log: called at most once, with the reason why weights stay in memory.
        folder: folder of the files; by default in the user's cache.

    Raises:
        EngineError: the engine's libraries are missing.
    """

    def __init__(self, log: Callable[[str], None], folder: Path | None = None) -> None:
        self._log = log
        self._folder = user_cache(PACKED) if folder is None else folder
        self._machine = f"{backend_sha256()}\n{_processor()}"
        self._refused = False
        self._ready: dict[Path, bool] = {}

    def open(
        self, program: HashedFile, weights: HashedFile, probes: Mapping[str, Sequence[Array]]
    ) -> WeightsFile:
        """Open a weights file for a program, with its packed file if there can be one.

        A missing or damaged packed file is made before its first use in this process. If that fails, `log`
        gets the reason and the weights stay in memory.

        Args:
            program: program with the methods of a block type.
            weights: constants of one block.
            probes: inputs by method, whose outputs must not change.

        Raises:
            BundleError: the weights file doesn't have its hash.
            BundleError, EngineError: the engine refuses the weights file or aborts on it.
        """
        path = self._folder / self._name(program, weights)
        if path not in self._ready:
            self._ready[path] = self._prepare(path, program, weights, probes)
        if self._ready[path]:
            try:
                return WeightsFile(weights.path, path)
            except EngineRefusalError as error:  # removed or locked in the meantime
                self._ready[path] = False
                self._refuse(f"{path}: {error}")
        # The engine doesn't verify a weights file, so a child opens it first; packing did so for a packed
        # file.
        check_in_child(weights.path, lambda: WeightsFile(weights.path))
        return WeightsFile(weights.path)

    def _prepare(
        self, path: Path, program: HashedFile, weights: HashedFile, probes: Mapping[str, Sequence[Array]]
    ) -> bool:
        """Return whether the packed file is complete, after making it if necessary."""
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
                    if not _is_whole(path):  # another process may have made it meanwhile
                        _make(path, program.path, weights.path, probes)
            with contextlib.suppress(PrgeError):  # then the next start compares again
                write_file(compared, identity)
            return True
        except OSError as error:
            self._refuse(as_clause(storage_error(self._folder, error).what))
        except PrgeError as error:
            self._refuse(as_clause(error.what))
        return False

    def _name(self, program: HashedFile, weights: HashedFile) -> str:
        content = f"{program.sha256}\n{weights.sha256}\n{self._machine}"
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _refuse(self, reason: str) -> None:
        if not self._refused:
            self._log(f"weights stay in memory instead of packed files: {reason}")
        self._refused = True


def folder_bytes(folder: Path) -> int:
    """Return the size of a cache folder's files in bytes."""
    return sum(path.stat().st_size for path in cache_files(folder))


def remove_files(folder: Path) -> int:
    """Remove the files of a cache folder and return their size in bytes.

    Processes that use a file keep it until they end.

    Raises:
        RunError: the storage refuses, or another process keeps making files.
    """
    if not folder.is_dir():
        return 0
    try:
        with _locked(folder):
            removed = folder_bytes(folder)
            for path in cache_files(folder):
                path.unlink()
            return removed
    except OSError as error:
        raise storage_error(folder, error) from None


def cache_files(folder: Path) -> list[Path]:
    """Return the files of a cache folder with their checksums; none if there is no folder."""
    return [path for path in sorted(folder.glob("*")) if path.name != _LOCK and path.is_file()]


def _processor() -> str:
    """Describe the processor features that select kernels, and so the format of packed weights."""
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
        digest = file_sha256(file.path)
    except OSError as error:
        raise BundleError(
            f"{file.path} can't be read: {error.strerror or error}",
            remedy="Copy or export the bundle again.",
            code="file-unreadable",
        ) from None
    if digest != file.sha256:
        raise BundleError(
            f"{file.path} is not the file that the manifest describes.",
            remedy="Copy or export the bundle again.",
            code="bundle-file-hash",
        )


def _identity(path: Path) -> bytes:
    """Return file metadata that changes with the content; empty if the file can't be read."""
    try:
        stat = path.stat()
    except OSError:
        return b""
    return f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\n".encode()


def _content(path: Path) -> bytes | None:
    try:
        return read_regular(path)
    except OSError:
        return None


def _is_whole(path: Path) -> bool:
    """Return whether a packed file matches its checksum."""
    try:
        return _content(path.with_name(path.name + _CHECKSUM)) == _checksum(path, path.name)
    except OSError:
        return False


def _checksum(path: Path, name: str) -> bytes:
    """Return a checksum of a file's content and name that detects damage.

    Every start reads the whole file; this checksum is 8 times as fast as SHA-256.
    """
    value, size = zlib.crc32(name.encode()), 0
    with open_regular(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
            size += len(chunk)
    return f"{value:08x} {size}\n".encode()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change a folder's files; the lock ends with the process."""
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
    """Make a packed file while holding the lock."""
    partial = path.with_name(path.name + ".partial")
    checksum = path.with_name(path.name + _CHECKSUM)
    try:
        for old in (path, checksum, partial):  # remains of a killed process, or damaged files
            old.unlink(missing_ok=True)
        _check_free_space(partial, weights.stat().st_size)
        check_in_child(weights, lambda: _pack(partial, program, weights, probes))
        content = _checksum(partial, path.name)
        os.replace(partial, path)
        flush_folder(path.parent)
        write_file(checksum, content)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _check_free_space(path: Path, weights_bytes: int) -> None:
    """Raise OSError if the storage is full: a write to mapped pages would end the engine with a signal."""
    with open_regular(path, "wb") as stream:
        # Packing pads rows of weights and starts each weight on its own page.
        os.posix_fallocate(stream.fileno(), 0, weights_bytes * 5 // 4 + (1 << 20))
        os.ftruncate(stream.fileno(), 0)


def _pack(path: Path, program: Path, weights: Path, probes: Mapping[str, Sequence[Array]]) -> None:
    """Write a packed file in a forked child.

    Raises:
        EngineRefusalError: the engine can't pack, or the methods' outputs would change.
    """
    without_threads()
    methods = Program(program)
    arena = Arena(max(map(methods.arena_bytes, methods.methods)))

    def outputs_of(opened: WeightsFile) -> list[bytes]:
        return [
            output
            for name, inputs in probes.items()
            for output in _outputs(methods, name, inputs, opened, arena)
        ]

    expected = outputs_of(WeightsFile(weights))
    packing = WeightsFile(weights, path, packing=True)
    # All methods stay loaded together: a method loaded alone would only read what the previous one wrote.
    loaded = [methods.load(name, weights=packing, arena=arena) for name in methods.methods]
    del loaded
    if outputs_of(WeightsFile(weights, path)) != expected:
        raise EngineRefusalError("its outputs change when its weights are packed to a file")


def _outputs(
    program: Program, name: str, inputs: Sequence[Array], weights: WeightsFile, arena: Arena
) -> list[bytes]:
    outputs = [np.empty(spec.sizes, spec.dtype) for spec in program.signature(name).outputs if spec]
    shapes = program.load(name, weights=weights, arena=arena).run(inputs, outputs)
    return [
        output.reshape(-1)[: int(np.prod(shape))].tobytes()
        for output, shape in zip(outputs, shapes, strict=True)
    ]
