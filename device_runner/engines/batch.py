"""Sequences of a call that pass the blocks together, and the inputs of the blocks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from device_runner.engines.planning import Layout
from device_runner.engines.shared_values import SharedValues
from prge.engine import Array, IntArray, TokenSequence

Arrays = dict[str, Array]


@dataclass
class Batch:
    """Rows of one layout that pass the blocks together.

    Attributes:
        rows: numbers of their sequences, i64 [copies, batch].
        copy: number of the call's adapter that each copy uses, i64 [copies].
        layout: padded length and branches of each row.
        values: hidden states, tangents or gradients by name, in the shapes that blocks take.
        extra_inputs: inputs that every block takes in addition.
        shared: values that several blocks read.
        directions: factors of the rows' directions, by their names in the call.
    """

    rows: IntArray
    copy: IntArray
    layout: Layout
    values: Arrays
    extra_inputs: Arrays
    shared: SharedValues
    directions: Arrays = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Number of tokens of each row, with padding."""
        return self.layout.length

    def of_one_copy(self, values: Arrays) -> Batch:
        """Return a batch of the same rows without the axis of copies, with new values without this axis."""
        extra_inputs = {
            name: array[0] if name == "padding_mask" else array for name, array in self.extra_inputs.items()
        }
        shared = self.shared.of_one_copy()
        return Batch(self.rows, self.copy, self.layout, values, extra_inputs, shared, self.directions)


def tokens_of(sequences: Sequence[TokenSequence], rows: IntArray, length: int) -> IntArray:
    """Return the tokens of rows, i64 [copies, batch, length], padded with zeros."""
    tokens = np.zeros((*rows.shape, length), np.int64)
    for index, number in np.ndenumerate(rows):
        sequence_tokens = sequences[int(number)].tokens[:length]
        tokens[index][: len(sequence_tokens)] = sequence_tokens
    return tokens
