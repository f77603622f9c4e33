"""Scoring examples with one adapter: every row is another sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prge.engine import Answering, Float64Array
from prge.files.adapter import Adapter, stack
from prge.learning.examples import Example, make_batch, weights_of
from prge.learning.head import Classifier
from prge.learning.objectives import CROSS_ENTROPY, BatchLoss, Objective


@dataclass(frozen=True)
class Scores:
    """What a model thinks of some examples.

    `scores`: f64 [candidates] per example; `losses` f64 [examples]; `predictions` i64 [examples].
    """

    scores: list[Float64Array]
    losses: Float64Array
    predictions: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @property
    def loss(self) -> float:
        """Mean loss of the examples, in whatever order they are."""
        return math.fsum(self.losses) / len(self.losses)


def score(
    engine: Answering,
    adapter: Adapter,
    examples: Sequence[Example],
    head: Classifier | None = None,
    pad: int = 0,
    objective: Objective = CROSS_ENTROPY,
) -> Scores:
    """Score every candidate of every example with one adapter: ceil(sequences / rows) calls.

    What an example is given doesn't depend on the others, nor on their order. Sequences of about one length
    go together, as rows of one padded length pass an engine's programs together.
    """
    contract = engine.contract
    inputs = stack(adapter, contract.copies)
    totals = [np.zeros(example.candidates) for example in examples]
    # A sequence at a time, so that an example may have more candidates than a call has rows.
    single = [
        (index, replace(example, sequences=(sequence,)))
        for index, example in enumerate(examples)
        for sequence in example.sequences
    ]
    single.sort(key=lambda pair: _tokens(pair[1]), reverse=True)
    for start in range(0, len(single), contract.rows):
        chunk = single[start : start + contract.rows]
        batch = make_batch([example for _, example in chunk], contract, rows=contract.rows, pad=pad)
        outputs = engine.forward({**batch.inputs(1, contract.is_encoder), **inputs})
        by_example = BatchLoss(batch, outputs[contract.answer], head=head).scores[0]
        for (index, example), row in zip(chunk, by_example, strict=True):
            totals[index] += row[: example.candidates]
    lengths = np.array([sum(len(s.targets) for s in example.sequences) for example in examples])
    most = max(len(total) for total in totals)
    table = np.full((1, len(totals), most), -np.inf)
    for index, total in enumerate(totals):
        table[0, index, : len(total)] = total
    losses = objective.losses(table, examples)[0] * weights_of(examples)
    return Scores(totals, losses, table[0].argmax(-1), lengths)


def referred(engine: Answering, adapter: Adapter, examples: Sequence[Example], pad: int = 0) -> list[Example]:
    """Examples with the scores by the adapter that a run begins with as their reference."""
    scores = score(engine, adapter, examples, pad=pad).scores
    pairs = zip(examples, scores, strict=True)
    return [replace(example, reference=tuple(values.tolist())) for example, values in pairs]


def pooled_states(
    engine: Answering, adapter: Adapter, examples: Sequence[Example], pad: int = 0
) -> NDArray[np.float32]:
    """An encoder's states of the examples, f32 [examples, width]: what a head is fitted on."""
    contract = engine.contract
    inputs = stack(adapter, contract.copies)
    states = []
    order = sorted(range(len(examples)), key=lambda index: _tokens(examples[index]), reverse=True)
    for start in range(0, len(order), contract.rows):
        chunk = order[start : start + contract.rows]
        batch = make_batch([examples[index] for index in chunk], contract, rows=contract.rows, pad=pad)
        outputs = engine.forward({**batch.inputs(1, True), **inputs})
        states.append(outputs["pooled"][: len(chunk)])
    return np.concatenate(states)[np.argsort(order)]


def _tokens(example: Example) -> int:
    """Tokens of an example's longest sequence."""
    return max(len(sequence.tokens) for sequence in example.sequences)
