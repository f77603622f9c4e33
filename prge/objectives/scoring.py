"""Scoring examples with one adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prge.engine import Call, Float64Array, FloatArray, ForwardEngine
from prge.formats.adapter import Adapter
from prge.objectives.classification_head import Classifier
from prge.objectives.examples import Example, microbatches, sequences_of, weights_of
from prge.objectives.objective import CROSS_ENTROPY, Loss, Objective

# Tokens that are scored at once: no more than a step computes.
SCORED_TOKENS = 512


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
    engine: ForwardEngine,
    adapter: Adapter,
    examples: Sequence[Example],
    head: Classifier | None = None,
    objective: Objective = CROSS_ENTROPY,
    *,
    on_progress: Callable[[int], object] = lambda sequences: None,
) -> Scores:
    """Score every candidate of every example with one adapter.

    What an example is given doesn't depend on the others, nor on their order.

    Args:
        engine: computes the outputs.
        adapter: to score with.
        examples: at least one.
        head: scores an encoder's states.
        objective: makes losses of scores.
        on_progress: called with the number of sequences that were computed.
    """
    totals = [np.zeros(example.candidates) for example in examples]
    for chunk, outputs in _outputs(engine, adapter, examples, on_progress):
        found = Loss([single for _, single in chunk], outputs, head=head).scores[0]
        for (index, example), row in zip(chunk, found, strict=True):
            totals[index] += row[: example.candidates]
    lengths = np.array([sum(len(s.targets) for s in example.sequences) for example in examples])
    most = max(len(total) for total in totals)
    table = np.full((1, len(totals), most), -np.inf)
    for index, total in enumerate(totals):
        table[0, index, : len(total)] = total
    losses = objective.losses(table, examples)[0] * weights_of(examples)
    return Scores(totals, losses, table[0].argmax(-1), lengths)


def with_reference_scores(
    engine: ForwardEngine,
    adapter: Adapter,
    examples: Sequence[Example],
    on_progress: Callable[[int], object] = lambda sequences: None,
) -> list[Example]:
    """Examples with the scores by the adapter that a run begins with as their reference."""
    scores = score(engine, adapter, examples, on_progress=on_progress).scores
    pairs = zip(examples, scores, strict=True)
    return [replace(example, reference=tuple(values.tolist())) for example, values in pairs]


def pooled_states(engine: ForwardEngine, adapter: Adapter, examples: Sequence[Example]) -> FloatArray:
    """An encoder's states of the examples, f32 [examples, width]: what a head is fitted on."""
    found = _outputs(engine, adapter, examples, lambda sequences: None)
    order = [
        (index, state)
        for chunk, outputs in found
        for (index, _), state in zip(chunk, outputs[0], strict=True)
    ]
    return np.stack([state for _, state in sorted(order, key=lambda pair: pair[0])])


def _outputs(
    engine: ForwardEngine, adapter: Adapter, examples: Sequence[Example], on_progress: Callable[[int], object]
) -> Iterator[tuple[list[tuple[int, Example]], FloatArray]]:
    """Examples of one sequence each, with the index of their own, and their outputs, the longest first.

    Sequences of about one length are computed together.
    """
    single = [
        (index, replace(example, sequences=(sequence,)))
        for index, example in enumerate(examples)
        for sequence in example.sequences
    ]
    single.sort(key=lambda pair: len(pair[1].sequences[0].tokens), reverse=True)
    done = 0
    for chunk in microbatches([example for _, example in single], SCORED_TOKENS):
        outputs = engine.forward(Call(sequences_of(chunk), adapter.values[None]))
        yield single[done : done + len(chunk)], outputs
        done += len(chunk)
        on_progress(done)
