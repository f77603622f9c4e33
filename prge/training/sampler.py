"""Sampling of training examples as a function of (seed, step), the same in a resumed run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from prge.engine import IntArray
from prge.objectives.examples import Example, LossNormalisation, weighted_by_tokens
from prge.training.estimators.directions import philox

# Directions use the streams from 0 on with the key (seed, step); row orders use the last stream.
_ROW_ORDER_STREAM = 2**64 - 1


@lru_cache(maxsize=4)
def row_order(seed: int, epoch: int, rows: int) -> IntArray:
    """Return a random permutation for an epoch, i64 [rows], the same on every machine."""
    keys = philox(seed, epoch, _ROW_ORDER_STREAM, rows)
    return np.argsort(keys, kind="stable")


def max_sequences(examples: Sequence[Example]) -> int:
    """Return the maximum number of sequences of an example; 1 if there are no examples."""
    return max((len(example.sequences) for example in examples), default=1)


class Sampler:
    """Samples the examples of each step, in a new random permutation for each epoch.

    A step can contain the last examples of an epoch and the first examples of the next.

    Args:
        examples: the training examples.
        batch_size: number of examples in a step.
        seed: seed of the permutations.
        normalisation: `token`: weight the examples of a step by their number of target tokens.
        repeats: number of consecutive steps with the same examples.

    Raises:
        ValueError: a step has no example.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        seed: int,
        normalisation: LossNormalisation = "example",
        repeats: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"a step has {batch_size} examples, must be at least 1")
        self.examples = examples
        self.batch_size = batch_size
        self.seed = seed
        self.normalisation = normalisation
        self.repeats = repeats
        self._sequences = [0]

    def examples_at(self, step: int) -> list[Example]:
        """Return the examples of a step, counted from 0, without weights of the normalisation."""
        count, step = len(self.examples), step // self.repeats
        cursor = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [self.examples[row_order(self.seed, i // count, count)[i % count]] for i in cursor]

    def batch(self, step: int) -> list[Example]:
        """Return the examples of a step, counted from 0, weighted according to the normalisation."""
        examples = self.examples_at(step)
        return weighted_by_tokens(examples) if self.normalisation == "token" else examples

    def sequences(self, steps: int) -> int:
        """Return the number of sequences in the first `steps` steps."""
        for step in range(len(self._sequences) - 1, steps):
            count = sum(len(example.sequences) for example in self.examples_at(step))
            self._sequences.append(self._sequences[-1] + count)
        return self._sequences[steps]
