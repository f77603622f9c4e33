"""How the sequences of a call are laid out for the programs: how long each is, and which of them go together.

    tokens of a sequence -> padded length      by the sequence and the bundle alone
    padded lengths       -> turns              as many sequences as an engine holds states of
    turn                 -> groups of rows     each of one length

A kernel may add up numbers in another order where a tensor has another length, and a layer that rounds what
it takes to int8 makes a small difference large. So no sequence is padded to the length of another, and its
outputs are the same bits whatever else is in the call. How many rows go together changes no bit: kernels
compute each row of a matrix alone, in the same way from two rows on. A single row may have a kernel of its
own, so programs are given at least two (`at_least_two`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prge.engine import STATES_AT_ONCE, Array, IntArray
from prge.formats.chain import FEWEST_TOKENS, Bounds

# Sequences are padded to multiples of this: for a few tokens more, more of them are of one length.
_MULTIPLE = 8


def padded_length(tokens: int, bounds: Bounds) -> int:
    """Tokens that a sequence is computed with, from how many its outputs depend on.

    One that is longer than a call is computed in chunks, which need no padding.
    """
    if tokens > bounds.chunk:
        return tokens
    return min(max(FEWEST_TOKENS, -(-tokens // _MULTIPLE) * _MULTIPLE), bounds.chunk)


def micro_batches(lengths: IntArray, passes: int) -> Iterator[IntArray]:
    """Numbers of the sequences whose states are held at once, shorter ones first; one at least.

    Args:
        lengths: padded lengths of the sequences, i64 [sequences].
        passes: copies of the adapter, or one more than there are directions.
    """
    chosen: list[int] = []
    states = 0
    for number in np.argsort(lengths, kind="stable").tolist():
        more = int(lengths[number]) * passes
        if chosen and states + more > STATES_AT_ONCE:
            yield np.array(chosen, np.int64)
            chosen, states = [], 0
        chosen.append(number)
        states += more
    yield np.array(chosen, np.int64)


def length_groups(rows: IntArray, lengths: IntArray, bounds: Bounds) -> Iterator[IntArray]:
    """Rows that pass a block together: of one length, as many as a call takes.

    Args:
        rows: numbers of sequences, i64 [rows].
        lengths: padded lengths of all sequences, i64 [sequences].
        bounds: of a call.
    """
    for length in np.unique(lengths[rows]):
        alike = rows[lengths[rows] == length]
        for some in slices(len(alike), bounds.batch if length <= bounds.chunk else 1):
            yield alike[some]


def single_adapter_groups(rows: IntArray, lengths: IntArray, bounds: Bounds) -> Iterator[IntArray]:
    """The same for rows that have one adapter, i64 [copies, batch]: rows take the place of copies, too."""
    for length in np.unique(lengths[rows]):
        alike = rows[lengths[rows] == length]
        batch = bounds.batch if length <= bounds.chunk else 1
        whole = len(alike) // batch * batch
        for part in (alike[:whole].reshape(-1, batch), alike[whole:].reshape(1, -1)):
            for some in slices(len(part) if part.size else 0, copies_together(int(length), bounds)):
                yield part[some]


def copies_together(length: int, bounds: Bounds) -> int:
    """How many copies of rows of a padded length pass a block together, at most."""
    return bounds.copies if length <= bounds.chunk else 1


def slices(stop: int, most: int, start: int = 0) -> Iterator[slice]:
    """`start` to `stop` in as few parts of at most `most` as there can be, of about one size."""
    count = stop - start
    parts = -(-count // most)
    for part in range(parts):
        yield slice(start + part * count // parts, start + (part + 1) * count // parts)


def at_least_two(rows: Array, axis: int = 0) -> Array:
    """Contiguous rows of a matrix, as many as a program takes: a single one is repeated."""
    if rows.shape[axis] < FEWEST_TOKENS:
        rows = np.repeat(rows, FEWEST_TOKENS, axis)
    return np.ascontiguousarray(rows)
