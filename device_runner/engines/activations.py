"""Activations that are read again: by the backward pass of the same call, or by later calls.

    checkpoints   hidden states that entered the blocks, until the backward pass takes them
    residuals     values inside blocks; a block without them computes its forward pass again
    trunk         hidden states that enter the lowest adapted block, kept from call to call (trunk_cache.py)

Checkpoints lie in memory, above a bound in a mapped file without a name, whose pages are the system's, and
which is gone however the process ends. Residuals are those of the last blocks that fit into a budget. What
lies where changes no bit of a gradient.
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

# As numpy aligns what the engine reads.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Residual:
    """Where a value that a block saves lies.

    Attributes:
        values: f32 [rows, tokens, width]; of a head [1, targets, width].
        memory: f32 [numbers] that begins there, with room for the largest output of the block.
    """

    values: FloatArray
    memory: FloatArray

    def output(self, start: int = 0) -> FloatArray:
        """Where the engine writes the value of a single row, from one of its tokens on."""
        return self.memory[start * self.values.shape[-1] :]


Residuals = Mapping[str, Residual]


class ActivationStore:
    """Holds the activations of one call after the other.

    Args:
        blocks: of an opened bundle.
        precision: of checkpoints. Hidden states beyond float16's range are kept in float32.
        folder: of the file of checkpoints, where there may be one.
        checkpoint_bytes: checkpoints of a call that take more lie in the file; None: never.
        residual_bytes: most bytes of the residuals of a call; None: blocks never save any.
        trunk: keeps what the blocks below the adapter compute.
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
        # Of each part of the call, what it keeps of the blocks so far.
        self._kept: dict[int, list[dict[str, Array]]] = {}
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
        """Forget the call before, and make room for one.

        Args:
            checkpoints: numbers in each array that is going to be kept.
            parts: rows and tokens of each part of the call; no tokens of one that saves nothing.
            targets: of all sequences.

        Raises:
            RunError: the file can't be had, as on a full disk.
        """
        self._used = 0
        self._kept = {}
        size = sum(checkpoints) * self._dtype.itemsize + len(checkpoints) * _ALIGNMENT
        if size > self._checkpoints.size:
            self._checkpoints, self._file = np.empty(0, np.uint8), None
            self._checkpoints = self._memory(size)
        self._allocate_residuals(parts, targets)

    def end(self) -> None:
        """Give the memory of checkpoints back where there is none for residuals; a file stays."""
        if self._file is None and not self.residual_bytes:
            self._checkpoints = np.empty(0, np.uint8)

    # Checkpoints

    def save(self, part: int, arrays: Mapping[str, FloatArray]) -> None:
        """Copy what the backward pass of a block needs of a part of the call."""
        kept = {name: self._copy(array) for name, array in arrays.items()}
        self._kept.setdefault(part, []).append(kept)

    @contextmanager
    def restore(self, part: int) -> Iterator[dict[str, FloatArray]]:
        """The arrays f32 of the last `keep` that isn't restored yet; a file's pages are given back later."""
        kept = self._kept[part].pop()
        yield {name: array.astype(np.float32, copy=False) for name, array in kept.items()}
        for array in kept.values():
            self._give_back(array)

    def _copy(self, array: FloatArray) -> Array:
        if self._dtype != array.dtype and np.abs(array).max() > np.finfo(self._dtype).max:
            return array.copy()
        size = array.size * self._dtype.itemsize
        kept = self._checkpoints[self._used : self._used + size].view(self._dtype).reshape(array.shape)
        kept[...] = array
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._give_back(kept)
        return kept

    def _give_back(self, kept: Array) -> None:
        """Let the system have the pages of what lies in the file; they are read again when needed."""
        if self._file is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = kept.__array_interface__["data"][0] - self._checkpoints.__array_interface__["data"][0]
        if 0 <= start < self._checkpoints.size:
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._file.madvise(mmap.MADV_DONTNEED, begin, start + kept.nbytes - begin)

    def _memory(self, size: int) -> Array:
        most = self._checkpoint_bytes
        if most is None or size <= most or self._folder is None:
            return np.empty(size, np.uint8)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # A file with holes would end the process with SIGBUS once the disk is full.
                os.posix_fallocate(file.fileno(), 0, size)
                self._file = mmap.mmap(file.fileno(), size)
                return np.frombuffer(self._file, np.uint8)
        except OSError as error:
            raise storage_error(self._folder, error) from None

    # Residuals

    def residuals(self, number: int, part: int = 0) -> Residuals:
        """Where the residuals of a block lie in a part of the call, by name; empty if it saves none."""
        found = self._residuals[number][part] if number in self._residuals else {}
        return {name: residual for name, residual in found.items() if residual.values.size}

    def saving_blocks(self, tokens: int, targets: int) -> dict[int, int]:
        """Bytes of residuals by the number of each block that saves them, the last block first.

        Args:
            tokens: of all sequences of a call.
            targets: of them.
        """
        found: dict[int, int] = {}
        for number in reversed(self._adapted):
            numbers = sum(self._widths[number].values()) * (targets if number >= self._head else tokens)
            if not numbers:
                continue
            if sum(found.values()) + 4 * numbers > (self.residual_bytes or 0):
                break
            found[number] = 4 * numbers
        return found

    def describe_residuals(self, tokens: int, targets: int) -> str:
        """Which blocks save residuals, in a line for the log."""
        found = self.saving_blocks(tokens, targets)
        size = f"{sum(found.values()) / 1e6:.0f} of {(self.residual_bytes or 0) / 1e6:.0f} MB"
        return (
            f"activations: {len(found)} of {len(self._adapted)} blocks save them for the backward pass "
            f"({size}), the others compute them again"
        )

    def _allocate_residuals(self, parts: Sequence[tuple[int, int]], targets: int) -> None:
        saving = self.saving_blocks(sum(rows * tokens for rows, tokens in parts), targets)
        # In the order that they are written: one target takes the room of two, the fewest of a program.
        shapes = [
            (number, name, (rows, tokens, width))
            for number in sorted(saving)
            for rows, tokens in ([(1, targets)] if number >= self._head else parts)
            for name, width in self._widths[number].items()
        ]
        step = _ALIGNMENT // 4
        starts = np.cumsum([0, *(-(-np.prod(shape) // step) * step for *_, shape in shapes)])
        # The engine is given memory for its largest output; what lies after the call's is never touched.
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
    """Where a forward pass writes residuals, from a token on."""
    return {name: residual.output(start) for name, residual in residuals.items()}


def residual_values(residuals: Residuals, tokens: slice = slice(None)) -> dict[str, Array]:
    """What a backward pass reads of residuals, of some tokens."""
    return {name: residual.values[:, tokens] for name, residual in residuals.items()}
