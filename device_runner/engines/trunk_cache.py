"""A cache of hidden states that enter the lowest adapted block: bounded, checksummed files in a folder.

Each file holds one row: its name is the hash of everything that determines the content. It contains a digest
and the values as float32 or float16. A damaged file is removed and computed again.

A full cache keeps its content: an epoch visits every row once, so the current row will be needed last. Files
are only removed when the bound is lowered.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

from prge.engine import Array, FloatArray
from prge.system.atomic import storage_error
from prge.system.regular_files import open_regular, read_regular

Precision = Literal["float32", "float16"]

_SUFFIX = ".states"
_DIGEST_BYTES = 32
_TYPES: dict[bytes, type[np.floating]] = {b"4": np.float32, b"2": np.float16}


class TrunkCache:
    """A folder of hidden states that enter the lowest adapted block.

    `bytes_kept` is the size of its files; `computed` and `reused` count rows.

    Args:
        folder: created if missing; other files in it are not changed.
        limit: maximum number of bytes of all files.
        precision: dtype of the stored values. A row beyond float16's range is stored in float32.

    Raises:
        RunError: the storage refuses the folder.
    """

    def __init__(self, folder: Path, limit: int, precision: Precision = "float32") -> None:
        self.folder = folder
        self.limit = limit
        self.precision = precision
        self.bytes_kept = self.computed = self.reused = 0
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

    def states(
        self, bundle: str, inputs: Sequence[Array], shape: tuple[int, ...], compute: Callable[[], FloatArray]
    ) -> FloatArray:
        """Return a row's hidden states f32, cached or computed now, rounded alike in both cases.

        Args:
            bundle: hash of the bundle.
            inputs: arrays that determine the states.
            shape: shape of the states.
            compute: function that computes the states.
        """
        key = self._key(bundle, inputs)
        stored = self._get(key, shape)
        if stored is not None:
            self.reused += 1
            return stored
        self.computed += 1
        states = compute()
        self._put(key, states)
        return states.astype(self._type(states)).astype(np.float32)

    def _key(self, bundle: str, inputs: Sequence[Array]) -> str:
        digest = hashlib.sha256(f"{bundle} {self.precision} ".encode())
        for array in inputs:
            digest.update(f"{array.dtype.str}{array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def _put(self, key: str, values: FloatArray) -> None:
        """Store a row's values if there is room; a storage error leaves the cache as it is."""
        dtype = self._type(values)
        (code,) = (code for code, known_dtype in _TYPES.items() if known_dtype is dtype)
        payload = code + np.ascontiguousarray(values, dtype).tobytes()
        size = _DIGEST_BYTES + len(payload)
        if key + _SUFFIX in self._sizes or self.bytes_kept + size > self.limit:
            return
        path = self.folder / (key + _SUFFIX)
        partial = path.with_name(f".{path.name}.partial")
        try:
            # Not flushed: after a power failure the digest reveals incomplete files.
            with open_regular(partial, "wb") as stream:
                stream.write(_digest(key, payload) + payload)
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            self.limit = self.bytes_kept
            return
        self._add(path.name, size)

    def _get(self, key: str, shape: tuple[int, ...]) -> FloatArray | None:
        """Return a row's values as float32; None if they aren't stored."""
        if key + _SUFFIX not in self._sizes:
            return None
        path = self.folder / (key + _SUFFIX)
        try:
            content = read_regular(path)
        except OSError:
            content = b""
        payload = content[_DIGEST_BYTES:]
        dtype = _TYPES.get(payload[:1])
        if (
            dtype is None
            or content[:_DIGEST_BYTES] != _digest(key, payload)
            or len(payload) != 1 + math.prod(shape) * np.dtype(dtype).itemsize
        ):
            self._remove(path.name)
            return None
        return np.frombuffer(payload, dtype, offset=1).astype(np.float32).reshape(shape)

    def _type(self, values: FloatArray) -> type[np.floating]:
        largest = float(np.finfo(np.float16).max)
        if self.precision == "float16" and np.abs(values).max(initial=0) <= largest:
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
    """Return the digest of a file's content and name, so that a renamed file is rejected."""
    return hashlib.sha256(key.encode() + payload).digest()
