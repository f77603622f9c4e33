"""The layout of a call's sequences for the programs: padded lengths and groups.

    tokens of a sequence -> padded length      from the sequence and the bundle alone
    padded lengths       -> micro-batches      sequences whose hidden states fit into memory together
    micro-batch          -> groups of rows     each of one padded length and with the same branches

A kernel may sum in another order when a tensor has another length, and int8 activations enlarge small
differences. So no sequence is padded to the length of another one, and its outputs have the same bits
whatever else is in the call. The number of rows in a group changes no bit: kernels compute each row of a
matrix alone, in the same way from two rows on. A single row may use a kernel of its own, so programs always
get at least two rows (`at_least_two`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prge.engine import MAX_HIDDEN_STATES, Array, IntArray, TokenSequence
from prge.formats.chain import MIN_TOKENS, Bounds

# Sequences are padded to multiples of this, so that more of them have the same length.
_MULTIPLE = 8


def padded_length(tokens: int, bounds: Bounds) -> int:
    """Return the padded length of a sequence whose outputs depend on its first `tokens` tokens.

    A sequence that is longer than a call is computed in chunks, which need no padding.
    """
    if tokens > bounds.chunk:
        return tokens
    return min(max(MIN_TOKENS, -(-tokens // _MULTIPLE) * _MULTIPLE), bounds.chunk)


def micro_batches(
    sequences: Sequence[TokenSequence],
    lengths: IntArray,
    bounds: Bounds,
    *,
    passes: int,
    chunk_passes: int | None = None,
) -> Iterator[IntArray]:
    """Yield the numbers of sequences whose hidden states are held at once; shorter ones first.

    Sequences that are computed in chunks are in batches of their own, and in order of their tokens, because
    they may have chunks in common.

    Args:
        sequences: the sequences.
        lengths: padded lengths of the sequences, i64 [sequences].
        bounds: bounds of a call.
        passes: copies of the adapter, or 1 + the number of directions.
        chunk_passes: the same for sequences that are computed in chunks; default: `passes`.
    """
    order = np.argsort(lengths, kind="stable").tolist()
    count = int((lengths <= bounds.chunk).sum())
    in_chunks = sorted(order[count:], key=lambda number: sequences[number].tokens)
    yield from _batches_of(order[:count], lengths, passes)
    yield from _batches_of(in_chunks, lengths, passes if chunk_passes is None else chunk_passes)


def _batches_of(order: Sequence[int], lengths: IntArray, passes: int) -> Iterator[IntArray]:
    chosen: list[int] = []
    held_states = 0
    for number in order:
        states = int(lengths[number]) * passes
        if chosen and held_states + states > MAX_HIDDEN_STATES:
            yield np.array(chosen, np.int64)
            chosen, held_states = [], 0
        chosen.append(number)
        held_states += states
    if chosen:
        yield np.array(chosen, np.int64)


@dataclass(frozen=True, order=True)
class Layout:
    """The layout of a row: its padded length, and where its branches start (see `TokenSequence`)."""

    length: int
    branches: tuple[int, ...] = ()

    @cached_property
    def positions(self) -> IntArray:
        """Position of each token in the text that it ends, i64 [length]."""
        positions = np.arange(self.length)
        for start in self.branches:
            positions[start:] = self.branches[0] + np.arange(self.length - start)
        return positions

    def hides(self, window: int | None = None) -> NDArray[np.bool_]:
        """Return whether the token of a row doesn't attend to that of a column, bool [length, length].

        Args:
            window: number of tokens that a token attends to, with itself; None: all earlier ones.
        """
        index, positions = np.arange(self.length), self.positions
        branch = np.searchsorted(self.branches, index, "right")
        is_hidden = index[:, None] < index
        is_hidden |= (branch > 0) & (branch[:, None] != branch)
        if window is not None:
            is_hidden |= positions[:, None] - positions >= window
        return is_hidden


def layout_groups(
    rows: IntArray, layouts: Sequence[Layout], bounds: Bounds, width: int, values: int = 1
) -> Iterator[IntArray]:
    """Yield groups of rows that pass a block together: rows of one layout, as many as a call takes.

    Args:
        rows: numbers of sequences, i64 [rows].
        layouts: layouts of all sequences.
        bounds: bounds of a call.
        width: width of the hidden states.
        values: values of each token: 1, or 1 + the number of directions.
    """
    for layout, alike in _rows_by_layout(rows, layouts):
        for row_slice in slices(len(alike), _batch_together(layout.length, bounds, width, values)):
            yield alike[row_slice]


def single_adapter_groups(
    rows: IntArray, layouts: Sequence[Layout], bounds: Bounds, width: int
) -> Iterator[IntArray]:
    """Yield groups i64 [copies, batch] of rows with one adapter, which also fill the axis of copies."""
    for layout, alike in _rows_by_layout(rows, layouts):
        batch = _batch_together(layout.length, bounds, width)
        whole = len(alike) // batch * batch
        for part in (alike[:whole].reshape(-1, batch), alike[whole:].reshape(1, -1)):
            if part.size:
                copies = copies_together(part.shape[1], layout.length, bounds, width)
                yield from (part[copy_slice] for copy_slice in slices(len(part), copies))


def _rows_by_layout(rows: IntArray, layouts: Sequence[Layout]) -> Iterator[tuple[Layout, IntArray]]:
    """Yield each layout with the rows that have it, shorter ones first."""
    of_rows = [layouts[number] for number in rows.tolist()]
    for layout in sorted({*of_rows}):
        yield layout, rows[[each == layout for each in of_rows]]


def copies_together(batch: int, length: int, bounds: Bounds, width: int) -> int:
    """Return the largest number of copies of `batch` rows of a padded length that pass a block together."""
    return max(1, min(bounds.copies, bounds.rows_together(length, width) // batch))


def _batch_together(length: int, bounds: Bounds, width: int, values: int = 1) -> int:
    return min(bounds.batch, bounds.rows_together(length, width, values))


def slices(stop: int, max_size: int, start: int = 0) -> Iterator[slice]:
    """Split `start` to `stop` into the fewest slices of at most `max_size` elements, of similar sizes."""
    count = stop - start
    parts = -(-count // max_size)
    for part in range(parts):
        yield slice(start + part * count // parts, start + (part + 1) * count // parts)


def at_least_two(rows: Array, axis: int = 0) -> Array:
    """Return contiguous rows of a matrix with at least two rows: a single row is repeated."""
    if rows.shape[axis] < MIN_TOKENS:
        rows = np.repeat(rows, MIN_TOKENS, axis)
    return np.ascontiguousarray(rows)
