"""Tables of which token stands where to which other: 1 where they do, 0 elsewhere.

behind     [1, tokens, tokens]   the second is `first` to `first + window - 1` tokens before the first
halves     [1, tokens, tokens]   of 2 `first` tokens in a row, one is of the second half, one of the first
meeting    [1, tokens, tokens]   the second lies between the first and where the halves of its 2 `first` meet
entering   [1, tokens, window]   the second, of `window` that came before the call, is `first` before it
leaving    [1, tokens, window]   the token is the second of the last `window`
staying    [1, window, window]   the first of `window` that came before is still the second of the last
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from prge.engine import FloatArray

RELATIONS = ("behind", "halves", "meeting", "entering", "leaving", "staying")


def relation_shape(relation_type: str, length: int, window: int | None) -> tuple[int, int, int]:
    """The shape of a table for calls of `length` tokens."""
    if relation_type in ("behind", "halves", "meeting"):
        return 1, length, length
    assert window is not None
    return 1, window if relation_type == "staying" else length, window


@lru_cache(maxsize=64)
def relation(relation_type: str, length: int, first: int, window: int | None) -> FloatArray:
    """A table f32 for calls of `length` tokens."""
    shape = relation_shape(relation_type, length, window)
    row, column = np.arange(shape[1])[:, None], np.arange(shape[2])
    if relation_type == "behind":
        apart = row - column
        found = (apart >= first) & (apart < (length if window is None else first + window))
    elif relation_type == "halves":
        found = (row // first % 2 == 1) & (column // first == row // first - 1)
    elif relation_type == "meeting":
        # A token of the second half is itself among those, one of the first isn't.
        within = column // first == row // first
        found = within & np.where(row // first % 2 == 1, column <= row, column > row)
    elif relation_type == "entering":
        found = row + shape[2] - column == first
    elif relation_type == "leaving":
        found = row == length - shape[2] + column
    else:
        found = row == length + column
    return found.astype(np.float32)[None]
