"""Which rows a step sees: a function of (seed, step) alone, so that a resumed run sees the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from prge.contract import Contract
from prge.engine import IntArray
from prge.errors import ConfigError
from prge.learning.estimators.directions import philox
from prge.learning.examples import Batch, Example, make_batch

# Directions use streams counted from 0 under the key (seed, step); row orders take the last stream.
_ROW_ORDER_STREAM = 2**64 - 1


@lru_cache(maxsize=4)
def row_order(seed: int, epoch: int, rows: int) -> IntArray:
    """A permutation of `rows` rows, i64 [rows], the same on every machine and numpy version."""
    keys = philox(seed, epoch, _ROW_ORDER_STREAM, rows)
    return np.argsort(keys, kind="stable")


def check_batch(contract: Contract, examples: Sequence[Example]) -> int:
    """The most sequences of one example; raises ConfigError if a batch has no room for them."""
    widest = max(examples, key=lambda example: len(example.sequences))
    sequences = len(widest.sequences)
    if sequences > contract.batch_size:
        raise ConfigError(
            "the batch is too small for the data",
            [f"row {widest.row} has {sequences} sequences, batch_size is {contract.batch_size}"],
            remedy=f"give --batch-size {sequences} or more",
        )
    return sequences


class Sampler:
    """Batches of a step: `calls` batches of as many whole examples as fit the bundle's rows.

    Every epoch is a new permutation; a step may span the end of one and the start of the next.
    """

    def __init__(
        self, examples: Sequence[Example], contract: Contract, seed: int, calls: int = 1, pad: int = 0
    ) -> None:
        self.per_call = contract.batch_size // check_batch(contract, examples)
        self.examples = examples
        self.contract = contract
        self.seed = seed
        self.calls = calls
        self.pad = pad

    @property
    def per_step(self) -> int:
        """Examples of one step."""
        return self.per_call * self.calls

    def chosen(self, step: int) -> list[Example]:
        """The examples of step `step`, counted from 0, in the order of its batches."""
        count = len(self.examples)
        cursor = range(step * self.per_step, (step + 1) * self.per_step)
        return [self.examples[row_order(self.seed, i // count, count)[i % count]] for i in cursor]

    def batches(self, step: int) -> list[Batch]:
        """The batches of step `step`, counted from 0."""
        chosen = self.chosen(step)
        return [
            make_batch(chosen[start : start + self.per_call], self.contract, pad=self.pad)
            for start in range(0, len(chosen), self.per_call)
        ]
