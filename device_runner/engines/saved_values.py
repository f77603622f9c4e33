"""The values that forward passes of an exact call save for the way back, in one stretch of memory.

    fitting   the blocks whose values a budget has room for: the last ones, which need them first
    begin     a place for each of their values
    place     where the engine writes one, and reads it again

Blocks that don't fit compute theirs again on the way back; gradients are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from device_runner.engines.blocks import Blocks
from prge.engine import Array, FloatArray

# As numpy aligns what the engine reads, in float32 numbers.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Place:
    """Where a value lies.

    Attributes:
        values: f32 [rows, tokens, width]; of a head [1, questions, width].
        behind: what lies from there on, at least as much as the largest call of the block answers.
    """

    values: FloatArray
    behind: FloatArray

    def room(self, start: int = 0) -> FloatArray:
        """Where the engine writes a part of a single row, from one of its tokens on."""
        return self.behind[start * self.values.shape[-1] :]


class SavedValues:
    """Room for the values of one call after the other.

    Args:
        blocks: of an opened bundle.
        most: bytes that the values of a call may take; 0: none are saved.
    """

    def __init__(self, blocks: Blocks, most: int) -> None:
        self.most = most
        chain = blocks.chain
        self._end = chain.end
        self._blocks = range(chain.lowest_adapted, len(chain.blocks))
        self._widths = {number: blocks.saved_widths(number) for number in self._blocks}
        bounds = chain.bounds.of_call
        widest = max((width for widths in self._widths.values() for width in widths.values()), default=0)
        self._largest = widest * max(bounds.batch * bounds.tokens, bounds.states)
        self._room: FloatArray = np.empty(0, np.float32)
        self._places: dict[int, list[dict[str, Place]]] = {}

    def fitting(self, tokens: int, asked: int) -> dict[int, int]:
        """Bytes by number of the blocks that save, in a call of so many tokens of all its rows that asks a
        decoder's head so many questions."""
        found: dict[int, int] = {}
        for number in reversed(self._blocks):
            numbers = sum(self._widths[number].values()) * (asked if number >= self._end else tokens)
            if not numbers:
                continue
            if sum(found.values()) + 4 * numbers > self.most:
                break
            found[number] = 4 * numbers
        return found

    def told(self, tokens: int, asked: int) -> str:
        """What `fitting` finds, in words."""
        found = self.fitting(tokens, asked)
        size = f"{sum(found.values()) / 1e6:.0f} of {self.most / 1e6:.0f} MB"
        return (
            f"activations: {len(found)} of {len(self._blocks)} blocks save them for the way back "
            f"({size}), the others compute them again"
        )

    def begin(self, calls: Sequence[tuple[int, int]], asked: int) -> None:
        """Forget the call before, and make room for one.

        Args:
            calls: rows and tokens of each call of a block; no tokens of one that saves nothing.
            asked: questions to a decoder's head.
        """
        fitting = self.fitting(sum(rows * tokens for rows, tokens in calls), asked)
        # In the order that they are written: one question takes the room of two, the fewest of a call.
        shapes = [
            (number, name, (rows, tokens, width))
            for number in sorted(fitting)
            for rows, tokens in ([(1, asked)] if number >= self._end else calls)
            for name, width in self._widths[number].items()
        ]
        starts = np.cumsum([0, *(-(-np.prod(shape) // _ALIGNMENT) * _ALIGNMENT for *_, shape in shapes)])
        # The engine is given room for its largest answer; what is behind a call's is never touched.
        size = int(starts[-1]) + self._largest if shapes else 0
        if size > self._room.size:
            self._room = np.empty(0, np.float32)
            self._room = np.empty(size, np.float32)
        self._places = {number: [] for number in fitting}
        for start, (number, name, shape) in zip(starts.tolist(), shapes, strict=False):
            places = self._places[number]
            if not places or name in places[-1]:
                places.append({})
            behind = self._room[start:]
            places[-1][name] = Place(behind[: np.prod(shape)].reshape(shape), behind)

    def places(self, number: int, call: int = 0) -> Mapping[str, Place]:
        """Where the values of a block lie in one of its calls, by name; empty if it saves none."""
        found = self._places[number][call] if number in self._places else {}
        return {name: place for name, place in found.items() if place.values.size}


def written(places: Mapping[str, Place], start: int = 0) -> dict[str, Array]:
    """Where a forward pass writes them, from a token on."""
    return {name: place.room(start) for name, place in places.items()}


def read(places: Mapping[str, Place], some: slice = slice(None)) -> dict[str, Array]:
    """What the way back reads, of some tokens."""
    return {name: place.values[:, some] for name, place in places.items()}
