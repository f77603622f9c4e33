"""Which rows a step sees: a function of (seed, step) alone, so that a resumed run sees the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from prge.contract import Contract
from prge.engine import IntArray
from prge.learning.estimators.directions import philox
from prge.learning.examples import Batch, Example, LossNormalisation, make_batch, weighted_by_tokens

# Directions use streams counted from 0 under the key (seed, step); row orders take the last stream.
_ROW_ORDER_STREAM = 2**64 - 1


@lru_cache(maxsize=4)
def row_order(seed: int, epoch: int, rows: int) -> IntArray:
    """A permutation of `rows` rows, i64 [rows], the same on every machine and numpy version."""
    keys = philox(seed, epoch, _ROW_ORDER_STREAM, rows)
    return np.argsort(keys, kind="stable")


def most_sequences(examples: Sequence[Example]) -> int:
    """Sequences of the example that has most of them; 1 without examples."""
    return max((len(example.sequences) for example in examples), default=1)


class Sampler:
    """Batches of a step: the step's examples, divided among its calls.

    Every epoch is a new permutation; a step may span the end of one and the start of the next.

    Args:
        examples: the training examples.
        contract: of the calls.
        seed: of the order.
        calls: batches of a step.
        pad: the token that fills rows up.
        batch_size: examples of a step, a multiple of `calls`; default: as many as the calls have room for.
        normalisation: `token` weights the examples of a step by their target tokens, all calls together.

    Raises:
        ValueError: a call has no room for its examples.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        contract: Contract,
        seed: int,
        calls: int = 1,
        pad: int = 0,
        *,
        batch_size: int | None = None,
        normalisation: LossNormalisation = "example",
    ) -> None:
        room = contract.batch_size // most_sequences(examples)
        self.per_call = room if batch_size is None else batch_size // calls
        if not 1 <= self.per_call <= room:
            raise ValueError(f"a call has {self.per_call} examples, and room for {room}")
        self.normalisation = normalisation
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
        chosen: Sequence[Example] = self.chosen(step)
        if self.normalisation == "token":
            chosen = weighted_by_tokens(chosen)
        return [
            make_batch(chosen[start : start + self.per_call], self.contract, pad=self.pad)
            for start in range(0, len(chosen), self.per_call)
        ]
