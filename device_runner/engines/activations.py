"""Activations that are read again: by the backward pass of the same call, or by later calls.

    checkpoints   hidden states that enter the blocks, kept until the backward pass reads them
    residuals     values inside blocks; the backward pass recomputes a block that saves none
    trunk         hidden states that enter the lowest adapted block, kept across calls (trunk_cache.py)

Checkpoints are in memory, or above a bound in an unlinked mapped file, which disappears however the process
ends. The last blocks whose residuals fit into a budget save them. Neither choice changes a bit of a gradient.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device_runner.engines.blocks import Blocks
from device_runner.engines.trunk_cache import Precision, TrunkCache
from prge.engine import Array, FloatArray
from prge.system.atomic import storage_error

# Bytes; numpy aligns the engine's inputs in the same way.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Residual:
    """Memory of one value that a block saves for its backward pass.

    Attributes:
        values: the value, f32 [rows, tokens, width]; for a head [1, targets, width].
        memory: f32 [elements] that starts at `values`, with room for the block's largest output.
    """

    values: FloatArray
    memory: FloatArray

    def output(self, start: int = 0) -> FloatArray:
        """Return the memory that the engine writes a single row to, starting at one of its tokens."""
        return self.memory[start * self.values.shape[-1] :]


Residuals = Mapping[str, Residual]


class ActivationStore:
    """Holds the activations of one call at a time.

    Args:
        blocks: blocks of an opened bundle.
        precision: dtype of checkpoints. Hidden states beyond float16's range stay in float32.
        folder: folder of the checkpoint file, if there may be one.
        checkpoint_bytes: a call with larger checkpoints stores them in the file; None: always in memory.
        residual_bytes: upper bound of the residuals of a call; None: blocks save no residuals.
        trunk: cache of the hidden states that enter the lowest adapted block.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        precision: Precision = "float32",
        folder: Path | None = None,
        checkpoint_bytes: int | None = None,
        residual_bytes: int | None = None,
        trunk: TrunkCache | None = None,
    ) -> None:
        self.trunk = trunk
        self.residual_bytes = residual_bytes
        self._dtype = np.dtype(precision)
        self._folder = folder
        self._checkpoint_bytes = checkpoint_bytes
        self._checkpoints: Array = np.empty(0, np.uint8)
        self._file: mmap.mmap | None = None
        self._used = 0
        # By part of the call: the checkpoints of each block so far.
        self._saved: dict[int, list[dict[str, Array]]] = {}
        chain = blocks.chain
        self._head = chain.head_start
        self._adapted = range(chain.lowest_adapted, len(chain.blocks))
        self._widths = {number: blocks.residual_widths(number) for number in self._adapted}
        bounds = chain.bounds.per_call
        widest = max((width for widths in self._widths.values() for width in widths.values()), default=0)
        self._largest_output = widest * max(bounds.batch * bounds.tokens, bounds.states)
        self._residual_memory: FloatArray = np.empty(0, np.float32)
        self._residuals: dict[int, list[dict[str, Residual]]] = {}

    def begin(self, checkpoints: Sequence[int], parts: Sequence[tuple[int, int]], targets: int) -> None:
        """Discard the activations of the last call and allocate memory for the next one.

        Args:
            checkpoints: number of elements of each array that the call saves.
            parts: rows and tokens of each part of the call; 0 tokens for a part that saves no residuals.
            targets: number of targets of all sequences.

        Raises:
            RunError: the checkpoint file can't be written, as on a full disk.
        """
        self._used = 0
        self._saved = {}
        size = sum(checkpoints) * self._dtype.itemsize + len(checkpoints) * _ALIGNMENT
        if size > self._checkpoints.size:
            self._checkpoints, self._file = np.empty(0, np.uint8), None
            self._checkpoints = self._allocate(size)
        self._allocate_residuals(parts, targets)

    def end(self) -> None:
        """Free the memory of checkpoints unless residuals are saved too; a file is kept for the next call."""
        if self._file is None and not self.residual_bytes:
            self._checkpoints = np.empty(0, np.uint8)

    # Checkpoints

    def save(self, part: int, arrays: Mapping[str, FloatArray]) -> None:
        """Save what the backward pass of a block needs of one part of the call."""
        saved = {name: self._copy(array) for name, array in arrays.items()}
        self._saved.setdefault(part, []).append(saved)

    @contextmanager
    def restore(self, part: int) -> Iterator[dict[str, FloatArray]]:
        """Yield the arrays of the last unrestored `save` as f32; then release their file pages."""
        saved = self._saved[part].pop()
        yield {name: array.astype(np.float32, copy=False) for name, array in saved.items()}
        for array in saved.values():
            self._release_pages(array)

    def _copy(self, array: FloatArray) -> Array:
        if self._dtype != array.dtype and np.abs(array).max() > np.finfo(self._dtype).max:
            return array.copy()
        size = array.size * self._dtype.itemsize
        copy = self._checkpoints[self._used : self._used + size].view(self._dtype).reshape(array.shape)
        copy[...] = array
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._release_pages(copy)
        return copy

    def _release_pages(self, array: Array) -> None:
        """Let the system reclaim the file pages of an array; reading the array loads them again."""
        if self._file is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = array.__array_interface__["data"][0] - self._checkpoints.__array_interface__["data"][0]
        if 0 <= start < self._checkpoints.size:
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._file.madvise(mmap.MADV_DONTNEED, begin, start + array.nbytes - begin)

    def _allocate(self, size: int) -> Array:
        limit = self._checkpoint_bytes
        if limit is None or size <= limit or self._folder is None:
            return np.empty(size, np.uint8)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # With a sparse file a full disk would end the process with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, size)
                self._file = mmap.mmap(file.fileno(), size)
                return np.frombuffer(self._file, np.uint8)
        except OSError as error:
            raise storage_error(self._folder, error) from None

    # Residuals

    def residuals(self, number: int, part: int = 0) -> Residuals:
        """Return the residuals of a block in one part of the call by name; empty if the block saves none."""
        of_part = self._residuals[number][part] if number in self._residuals else {}
        return {name: residual for name, residual in of_part.items() if residual.values.size}

    def saving_blocks(self, tokens: int, targets: int) -> dict[int, int]:
        """Return the bytes of residuals by the number of each block that saves them, the last block first.

        Args:
            tokens: number of tokens of all sequences of a call.
            targets: number of targets of all sequences of a call.
        """
        saved_bytes: dict[int, int] = {}
        for number in reversed(self._adapted):
            count = sum(self._widths[number].values()) * (targets if number >= self._head else tokens)
            if not count:
                continue
            if sum(saved_bytes.values()) + 4 * count > (self.residual_bytes or 0):
                break
            saved_bytes[number] = 4 * count
        return saved_bytes

    def describe_residuals(self, tokens: int, targets: int) -> str:
        """Return a line for the log with the number of blocks that save residuals."""
        saved_bytes = self.saving_blocks(tokens, targets)
        size = f"{sum(saved_bytes.values()) / 1e6:.0f} of {(self.residual_bytes or 0) / 1e6:.0f} MB"
        return (
            f"activations: {len(saved_bytes)} of {len(self._adapted)} blocks save them for the backward pass "
            f"({size}), the others compute them again"
        )

    def _allocate_residuals(self, parts: Sequence[tuple[int, int]], targets: int) -> None:
        saving = self.saving_blocks(sum(rows * tokens for rows, tokens in parts), targets)
        # In the order in which they are written. A program takes at least two targets: the second needs no
        # memory of its own.
        shapes = [
            (number, name, (rows, tokens, width))
            for number in sorted(saving)
            for rows, tokens in ([(1, targets)] if number >= self._head else parts)
            for name, width in self._widths[number].items()
        ]
        step = _ALIGNMENT // 4
        starts = np.cumsum([0, *(-(-np.prod(shape) // step) * step for *_, shape in shapes)])
        # The engine gets memory for its largest output; it never writes beyond the values of this call.
        size = int(starts[-1]) + self._largest_output if shapes else 0
        if size > self._residual_memory.size:
            self._residual_memory = np.empty(0, np.float32)
            self._residual_memory = np.empty(size, np.float32)
        self._residuals = {number: [] for number in saving}
        for start, (number, name, shape) in zip(starts.tolist(), shapes, strict=False):
            of_parts = self._residuals[number]
            if not of_parts or name in of_parts[-1]:
                of_parts.append({})
            memory = self._residual_memory[start:]
            of_parts[-1][name] = Residual(memory[: np.prod(shape)].reshape(shape), memory)


def residual_outputs(residuals: Residuals, start: int = 0) -> dict[str, Array]:
    """Return the memory that a forward pass writes residuals to, starting at a token."""
    return {name: residual.output(start) for name, residual in residuals.items()}


def residual_values(residuals: Residuals, tokens: slice = slice(None)) -> dict[str, Array]:
    """Return the residuals of some tokens, as a backward pass reads them."""
    return {name: residual.values[:, tokens] for name, residual in residuals.items()}
