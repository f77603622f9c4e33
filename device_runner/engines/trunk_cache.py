"""What a trunk made of rows, kept in a folder: bounded, checksummed, whole or absent.

A file is one row: its key is the hash of everything that its content follows from, and its name. It holds
a digest and the values, float32 or float16. A file that isn't what it should be is removed and made again.

A full cache keeps what it holds: an epoch visits every row once, so the row at hand is the one that will be
needed last. Files leave it when the bound is lowered.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

from prge.atomic import storage_error
from prge.contract import TensorSpec
from prge.engine import Array, FloatArray
from prge.regular_files import open_regular, read_regular

Precision = Literal["float32", "float16"]

_SUFFIX = ".states"
_DIGEST_BYTES = 32
_TYPES: dict[bytes, type[np.floating]] = {b"4": np.float32, b"2": np.float16}


class TrunkCache:
    """A folder of the trunk's outputs; `bytes_kept` is their size in files.

    Args:
        folder: made if it isn't there; whatever else lies in it is left alone.
        limit: bytes that all files together may have.
        precision: of the values in a file. A row beyond float16's range is kept in float32.

    Raises:
        RunError: the storage refuses the folder.
    """

    def __init__(self, folder: Path, limit: int, precision: Precision = "float32") -> None:
        self.folder = folder
        self.limit = limit
        self.precision = precision
        self.bytes_kept = 0
        self._sizes: dict[str, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.iterdir()):
                if path.name.endswith(f"{_SUFFIX}.partial"):
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
                elif path.suffix == _SUFFIX:
                    self._add(path.name, path.lstat().st_size)
        except OSError as error:
            raise storage_error(folder, error) from None
        for name in list(self._sizes):
            if self.bytes_kept <= limit:
                break
            self._remove(name)

    def __len__(self) -> int:
        return len(self._sizes)

    def key(self, program: str, inputs: Sequence[Array]) -> str:
        """Key of a row: the hash of the program, of the kept precision and of the row's inputs."""
        digest = hashlib.sha256(f"{program} {self.precision} ".encode())
        for array in inputs:
            digest.update(f"{array.dtype.str}{array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def rounded(self, values: Sequence[FloatArray]) -> list[FloatArray]:
        """A row's values as the cache would give them back, float32, whether it keeps them or not."""
        kind = self._type(values)
        return [value.astype(kind).astype(np.float32) for value in values]

    def put(self, key: str, values: Sequence[FloatArray]) -> None:
        """Keep a row's values if there is room; a storage that refuses leaves the cache as it is."""
        kind = self._type(values)
        (code,) = (code for code, known in _TYPES.items() if known is kind)
        payload = code + b"".join(np.ascontiguousarray(value, kind).tobytes() for value in values)
        size = _DIGEST_BYTES + len(payload)
        if key + _SUFFIX in self._sizes or self.bytes_kept + size > self.limit:
            return
        path = self.folder / (key + _SUFFIX)
        partial = path.with_name(f".{path.name}.partial")
        try:
            # Not flushed: after a loss of power the digest tells what is whole.
            with open_regular(partial, "wb") as stream:
                stream.write(_digest(key, payload) + payload)
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            self.limit = self.bytes_kept
            return
        self._add(path.name, size)

    def get(self, key: str, specs: Sequence[TensorSpec]) -> list[FloatArray] | None:
        """A row's values, float32 [*shape[1:]] for every spec; None if they aren't there."""
        if key + _SUFFIX not in self._sizes:
            return None
        path = self.folder / (key + _SUFFIX)
        try:
            content = read_regular(path)
        except OSError:
            content = b""
        payload = content[_DIGEST_BYTES:]
        kind = _TYPES.get(payload[:1])
        counts = [int(np.prod(spec.shape[1:])) for spec in specs]
        if (
            kind is None
            or content[:_DIGEST_BYTES] != _digest(key, payload)
            or len(payload) != 1 + sum(counts) * np.dtype(kind).itemsize
        ):
            self._remove(path.name)
            return None
        return list(_parts(np.frombuffer(payload, kind, offset=1), counts, specs))

    def _type(self, values: Sequence[FloatArray]) -> type[np.floating]:
        largest = float(np.finfo(np.float16).max)
        if self.precision == "float16" and all(np.abs(value).max(initial=0) <= largest for value in values):
            return np.float16
        return np.float32

    def _add(self, name: str, size: int) -> None:
        self._sizes[name] = size
        self.bytes_kept += size

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)
        self.bytes_kept -= self._sizes.pop(name)


def _digest(key: str, payload: bytes) -> bytes:
    """Digest of a file's content under its name: a file that was renamed is not what its name says."""
    return hashlib.sha256(key.encode() + payload).digest()


def _parts(values: Array, counts: Sequence[int], specs: Sequence[TensorSpec]) -> Iterator[FloatArray]:
    start = 0
    for count, spec in zip(counts, specs, strict=True):
        yield values[start : start + count].astype(np.float32).reshape(spec.shape[1:])
        start += count
