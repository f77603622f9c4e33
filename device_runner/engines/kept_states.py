"""The states that entered the blocks of an exact call, kept until the way back needs them.

They lie in memory. Above a bound they lie in a mapped file without a name, whose pages are the system's, and
which is gone however the process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

from device_runner.engines.trunk_cache import Precision
from prge.engine import Array, FloatArray
from prge.host.atomic import storage_error

# As numpy aligns what the engine reads.
_ALIGNMENT = 64


class KeptStates:
    """Room for the states of one call after the other.

    Args:
        precision: of what is kept. A state beyond float16's range is kept in float32.
        folder: of the file, where there may be one.
        most: bytes that may lie in memory instead of the file.
    """

    def __init__(
        self, precision: Precision = "float32", folder: Path | None = None, most: int | None = None
    ) -> None:
        self.precision = precision
        self._type = np.dtype(precision)
        self._folder = folder
        self._most = most
        self._room: Array = np.empty(0, np.uint8)
        self._file: mmap.mmap | None = None
        self._used = 0

    def begin(self, states: int, numbers: int) -> None:
        """Forget what was kept, and make room for so many states of so many numbers in all.

        Raises:
            RunError: the file can't be had, as on a full disk.
        """
        self._used = 0
        size = numbers * self._type.itemsize + states * _ALIGNMENT
        if size > self._room.size:
            self._room, self._file = np.empty(0, np.uint8), None
            self._room = self._new_room(size)

    def keep(self, state: FloatArray) -> Array:
        """A copy of a state, in the precision that is kept."""
        if self._type != state.dtype and np.abs(state).max() > np.finfo(self._type).max:
            return state.copy()
        size = state.size * self._type.itemsize
        kept = self._room[self._used : self._used + size].view(self._type).reshape(state.shape)
        kept[...] = state
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.leave(kept)
        return kept

    def leave(self, kept: Array) -> None:
        """Let the system have the pages of what is kept in a file; they are read again when needed."""
        if self._file is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = kept.__array_interface__["data"][0] - self._room.__array_interface__["data"][0]
        if 0 <= start < self._room.size:
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._file.madvise(mmap.MADV_DONTNEED, begin, start + kept.nbytes - begin)

    def forget(self) -> None:
        """Give back the memory of what was kept; a file stays for the next call."""
        if self._file is None:
            self._room = np.empty(0, np.uint8)

    def _new_room(self, size: int) -> Array:
        if self._most is None or size <= self._most or self._folder is None:
            return np.empty(size, np.uint8)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # A file with holes would end the process with SIGBUS once the disk is full.
                os.posix_fallocate(file.fileno(), 0, size)
                self._file = mmap.mmap(file.fileno(), size)
                return np.frombuffer(self._file, np.uint8)
        except OSError as error:
            raise storage_error(self._folder, error) from None
