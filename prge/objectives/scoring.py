"""Scores of examples with one adapter."""

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

# Maximum number of tokens in a call that scores examples, so that scoring needs no more memory than a step.
MAX_SCORING_TOKENS = 512
# Engines may compute the common tokens of longer sequences once. A call has more of them, which need less
# memory than an exact step's checkpoints of all blocks.
LONG_TOKENS, MAX_LONG_TOKENS = 256, 8 * MAX_SCORING_TOKENS


# The index of an example, and the example with one of its sequences.
IndexedExample = tuple[int, Example]


@dataclass(frozen=True)
class Scores:
    """The scores of examples, and what follows from them.

    Attributes:
        scores: the candidates' scores of each example, f64 [candidates].
        losses: the loss of each example, f64 [examples].
        predictions: index of the candidate with the highest score, i64 [examples].
        tokens: number of target tokens, i64 [examples].
    """

    scores: list[Float64Array]
    losses: Float64Array
    predictions: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @property
    def loss(self) -> float:
        """Mean loss of the examples; the sum is exact, so it doesn't depend on their order."""
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

    The scores of an example don't depend on the other examples or on their order.

    Args:
        engine: computes the outputs.
        adapter: the adapter to score with.
        examples: at least one example.
        head: computes scores from an encoder's pooled states; None for a decoder.
        objective: the loss as a function of scores.
        on_progress: called with the number of sequences computed so far.
    """
    totals = [np.zeros(example.candidates) for example in examples]
    for batch, outputs in _outputs(engine, adapter, examples, on_progress):
        scores = Loss([single for _, single in batch], outputs, head=head).scores[0]
        for (index, example), row in zip(batch, scores, strict=True):
            totals[index] += row[: example.candidates]
    lengths = np.array([sum(len(s.targets) for s in example.sequences) for example in examples])
    width = max(len(total) for total in totals)
    table = np.full((1, len(totals), width), -np.inf)
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
    """Return the examples with `reference` set to their scores by `adapter`, which a run starts from."""
    scores = score(engine, adapter, examples, on_progress=on_progress).scores
    pairs = zip(examples, scores, strict=True)
    return [replace(example, reference=tuple(values.tolist())) for example, values in pairs]


def pooled_states(engine: ForwardEngine, adapter: Adapter, examples: Sequence[Example]) -> FloatArray:
    """Return an encoder's pooled states of the examples, f32 [examples, width]."""
    batches = _outputs(engine, adapter, examples, lambda sequences: None)
    indexed = [
        (index, state)
        for batch, outputs in batches
        for (index, _), state in zip(batch, outputs[0], strict=True)
    ]
    return np.stack([state for _, state in sorted(indexed, key=lambda pair: pair[0])])


def _outputs(
    engine: ForwardEngine, adapter: Adapter, examples: Sequence[Example], on_progress: Callable[[int], object]
) -> Iterator[tuple[list[IndexedExample], FloatArray]]:
    """Yield batches of (index of the example, example with one sequence), and their outputs.

    Long sequences are in order of their tokens, so that those with a common prefix are in one batch. The
    others are in order of length, so that each batch has sequences of similar length.
    """
    single = [
        (index, replace(example, sequences=(sequence,)))
        for index, example in enumerate(examples)
        for sequence in example.sequences
    ]
    long = [pair for pair in single if len(_tokens(pair)) > LONG_TOKENS]
    long.sort(key=_tokens)
    short = [pair for pair in single if len(_tokens(pair)) <= LONG_TOKENS]
    short.sort(key=lambda pair: len(_tokens(pair)), reverse=True)
    done = 0
    for pairs, limit in ((long, MAX_LONG_TOKENS), (short, MAX_SCORING_TOKENS)):
        start = 0
        for batch in microbatches([example for _, example in pairs], limit):
            outputs = engine.forward(Call(sequences_of(batch), adapter.values[None]))
            yield pairs[start : start + len(batch)], outputs
            start += len(batch)
            on_progress(done + start)
        done += start


def _tokens(pair: IndexedExample) -> tuple[int, ...]:
    """Return the tokens of an example with one sequence."""
    return pair[1].sequences[0].tokens
