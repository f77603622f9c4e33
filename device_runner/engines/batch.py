"""Sequences of a call that pass the blocks together, and what the blocks are given for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from device_runner.engines.shared_values import SharedValues
from prge.engine import Array, IntArray, TokenSequence

Arrays = dict[str, Array]


@dataclass
class Batch:
    """Rows that pass the blocks together, all of one padded length.

    Attributes:
        rows: numbers of their sequences, i64 [copies, batch].
        copy: which of the call's adapters each copy has, i64 [copies].
        values: the state by name, in the shape that blocks take.
        beside: what every block is given beside it.
        shared: values that several blocks read.
        directions: factors of the rows' directions, by their names in the call.
    """

    rows: IntArray
    copy: IntArray
    values: Arrays
    extra_inputs: Arrays
    shared: SharedValues
    directions: Arrays = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of its rows, with padding."""
        return int(self.extra_inputs["ones"].shape[1])

    def of_one_copy(self, values: Arrays) -> Batch:
        """The same rows without the axis of copies, with values that lack it."""
        extra_inputs = {
            name: array[0] if name == "padding_mask" else array for name, array in self.extra_inputs.items()
        }
        shared = self.shared.of_one_copy()
        return Batch(self.rows, self.copy, values, extra_inputs, shared, self.directions)


def tokens_of(sequences: Sequence[TokenSequence], rows: IntArray, length: int) -> IntArray:
    """Tokens of rows, i64 [copies, batch, length], with zeros behind a sequence's end."""
    tokens = np.zeros((*rows.shape, length), np.int64)
    for place, number in np.ndenumerate(rows):
        given = sequences[int(number)].tokens[:length]
        tokens[place][: len(given)] = given
    return tokens
