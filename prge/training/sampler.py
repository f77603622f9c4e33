"""Which rows a step sees: a function of (seed, step) alone, so that a resumed run sees the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from prge.engine import IntArray
from prge.objectives.examples import Example, LossNormalisation, weighted_by_tokens
from prge.training.estimators.directions import philox

# Directions use streams counted from 0 under the key (seed, step); row orders take the last stream.
_ROW_ORDER_STREAM = 2**64 - 1


@lru_cache(maxsize=4)
def row_order(seed: int, epoch: int, rows: int) -> IntArray:
    """A permutation of `rows` rows, i64 [rows], the same on every machine and numpy version."""
    keys = philox(seed, epoch, _ROW_ORDER_STREAM, rows)
    return np.argsort(keys, kind="stable")


def max_sequences(examples: Sequence[Example]) -> int:
    """Sequences of the example that has most of them; 1 without examples."""
    return max((len(example.sequences) for example in examples), default=1)


class Sampler:
    """The examples of each step.

    Every epoch is a new permutation; a step may span the end of one and the start of the next.

    Args:
        examples: the training examples.
        batch_size: examples of a step.
        seed: of the order.
        normalisation: `token` weights the examples of a step by their target tokens.

    Raises:
        ValueError: a step has no example.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        seed: int,
        normalisation: LossNormalisation = "example",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"a step has {batch_size} examples, must be at least 1")
        self.examples = examples
        self.batch_size = batch_size
        self.seed = seed
        self.normalisation = normalisation
        self._sequences = [0]

    def examples_at(self, step: int) -> list[Example]:
        """The examples of step `step`, counted from 0, as they are."""
        count = len(self.examples)
        cursor = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [self.examples[row_order(self.seed, i // count, count)[i % count]] for i in cursor]

    def batch(self, step: int) -> list[Example]:
        """The examples of step `step`, weighted by the normalisation."""
        chosen = self.examples_at(step)
        return weighted_by_tokens(chosen) if self.normalisation == "token" else chosen

    def sequences(self, steps: int) -> int:
        """How many sequences the first so many steps have."""
        for step in range(len(self._sequences) - 1, steps):
            count = sum(len(example.sequences) for example in self.examples_at(step))
            self._sequences.append(self._sequences[-1] + count)
        return self._sequences[steps]
