"""Tables of positional relations between tokens (row, column): 1 where a relation holds, else 0.

behind     [1, tokens, tokens]   the column is `first` to `first + window - 1` positions before the row
halves     [1, tokens, tokens]   in groups of 2 * `first` tokens: the row is in a group's second half, the
                                 column in its first half
meeting    [1, tokens, tokens]   in groups of 2 * `first` tokens: the column is between the row and the middle
                                 of the row's group
entering   [1, tokens, window]   the column, one of `window` tokens before the call, is `first` before the row
leaving    [1, tokens, window]   the column, one of the last `window` tokens of the call, is the row
staying    [1, window, window]   the row, one of `window` tokens before the call, is the column, one of the
                                 last `window` tokens after it
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from prge.engine import FloatArray

RELATIONS = ("behind", "halves", "meeting", "entering", "leaving", "staying")


def relation_shape(relation_type: str, length: int, window: int | None) -> tuple[int, int, int]:
    """Return the shape of a table for calls of `length` tokens."""
    if relation_type in ("behind", "halves", "meeting"):
        return 1, length, length
    assert window is not None
    return 1, window if relation_type == "staying" else length, window


@lru_cache(maxsize=64)
def relation(relation_type: str, length: int, first: int, window: int | None) -> FloatArray:
    """Return a table for calls of `length` tokens, f32; see the module's docstring."""
    shape = relation_shape(relation_type, length, window)
    row, column = np.arange(shape[1])[:, None], np.arange(shape[2])
    if relation_type == "behind":
        distance = row - column
        holds = (distance >= first) & (distance < (length if window is None else first + window))
    elif relation_type == "halves":
        holds = (row // first % 2 == 1) & (column // first == row // first - 1)
    elif relation_type == "meeting":
        # This includes the row itself in the second half, but not in the first.
        within = column // first == row // first
        holds = within & np.where(row // first % 2 == 1, column <= row, column > row)
    elif relation_type == "entering":
        holds = row + shape[2] - column == first
    elif relation_type == "leaving":
        holds = row == length - shape[2] + column
    else:
        holds = row == length + column
    return holds.astype(np.float32)[None]
