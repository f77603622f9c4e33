"""Losses as functions of scores, and the one chain rule between an engine's answers and a loss.

    answers -> scores [copies, examples, candidates] -> losses [copies, examples]

Scores are weighted sums of log-probabilities (examples.py), or what an encoder's head makes of its states.
An objective sees scores alone, so it runs with every estimator and on every engine:

    differences   read the losses of all copies
    tangents      slopes by the scores, times how the scores change along a direction
    exact         slopes by the scores, taken back to the answers, from where the engine goes on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from prge.engine import Array, Float64Array, FloatArray
from prge.learning.examples import Batch, Example, labels_of, weights_of
from prge.learning.head import Classifier, Head


class Objective(Protocol):
    """A loss of examples by the scores of their candidates, f64 [copies, examples, candidates].

    An example with fewer candidates than others has scores of -inf behind its own. The examples are those of
    one call, and the copies all that a step compares: what a loss takes of other examples is the same for all
    copies, and its slopes leave it out.
    """

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """Loss of every example, f64 [copies, examples]."""
        ...

    def slopes(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """Derivative of every example's loss by its scores, in their shape; 0 where it has none."""
        ...


class CrossEntropy:
    """Implements Objective: what an example's label says, or without one that its only score is to rise.

    A completion's loss is the mean negative log-likelihood of its tokens. That of candidates is the
    cross-entropy of the right one among their scores (MeZO's classification loss, Malladi et al. 2023, arXiv
    2305.17333); the vocabulary's normalizer cancels in it.
    """

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        labels = labels_of(examples)
        chosen = scores[:, np.arange(len(labels)), np.maximum(labels, 0)]
        return np.where(labels < 0, -chosen, _log_sum_exp(scores) - chosen)

    def slopes(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        labels = labels_of(examples)
        slopes = np.exp(scores - _log_sum_exp(scores)[..., None])
        slopes[:, labels < 0] = 0
        slopes[:, np.arange(len(labels)), np.maximum(labels, 0)] -= 1
        return slopes


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch at what an engine answered, and its derivatives.

    `answers`: [copies * rows, positions] log-probabilities, or [copies * rows, width] of an encoder, whose
    `head` scores its states.
    """

    batch: Batch
    answers: Array
    objective: Objective = CROSS_ENTROPY
    head: Classifier | None = None
    copies: int = 1

    @cached_property
    def scores(self) -> Float64Array:
        """Score of every candidate, f64 [copies, examples, candidates]; -inf where an example has fewer."""
        if self.head is not None:
            return self.head.scores(self._states(self.answers, self.copies), self.batch.rows)
        total = self._weighted_sums(self.answers, self.copies)
        total[:, np.arange(total.shape[-1]) >= self.batch.candidates[:, None]] = -np.inf
        return total

    @property
    def losses(self) -> Float64Array:
        """Loss of every example with its weight, f64 [copies, examples]."""
        members = self.batch.members
        return self.objective.losses(self.scores, members) * weights_of(members)

    @cached_property
    def by_score(self) -> Float64Array:
        """Derivative of every example's loss by its scores, f64 [copies, examples, candidates]."""
        members = self.batch.members
        return self.objective.slopes(self.scores, members) * weights_of(members)[:, None]

    def along(self, tangents: Array) -> Float64Array:
        """Derivative of every example's loss along directions, f64 [queries, examples]; of one copy.

        Args:
            tangents: derivatives of the answers, [queries, rows, positions] or [queries, rows, width].
        """
        queries = len(tangents)
        if self.head is None:
            changes = self._weighted_sums(tangents, queries)
        else:
            changes = self.head.slopes(self._states(tangents, queries), self.batch.rows)
        found: Float64Array = (self.by_score * changes).sum(-1)
        return found

    @property
    def by_answer(self) -> Float64Array:
        """Derivative of the sum of all losses by the answers, f64 in their shape; of one copy."""
        batch, (by_score,) = self.batch, self.by_score
        slopes = np.zeros(self.answers.shape)
        if self.head is not None:
            weights, _ = self.head.layers(batch.rows)
            slopes[batch.owner >= 0] = np.matmul(by_score[:, None], weights.astype(np.float64))[:, 0]
            return slopes
        row, place = self._read
        slopes[row, place] = (
            batch.weights[row, place] * by_score[batch.owner[row], batch.candidate[row, place]]
        )
        return slopes

    def by_head(self, head: Head) -> Float64Array:
        """Derivative of the sum of all losses by a head's values, f64 [size]; summed over copies."""
        return head.gradient(self._states(self.answers, self.copies), self.by_score)

    def largest(self, tangents: Array) -> float:
        """Largest size of a derivative that was asked for; NaN if one is not a number."""
        if self.head is not None:
            asked = self._states(tangents, len(tangents))
        else:
            row, place = self._read
            asked = tangents[:, row, place]
        return float(np.abs(asked).max(initial=0.0))

    @cached_property
    def _read(self) -> tuple[Array, Array]:
        """Rows and places that count."""
        row, place = np.nonzero((self.batch.weights != 0) & (self.batch.owner >= 0)[:, None])
        return row, place

    def _states(self, pooled: Array, copies: int) -> FloatArray:
        """The states of the examples, [copies, examples, width], without those of padding rows."""
        return pooled.reshape(copies, len(self.batch.owner), -1)[:, self.batch.owner >= 0]

    def _weighted_sums(self, answers: Array, copies: int) -> Float64Array:
        """What was read, summed with its weights by candidate, f64 [copies, examples, candidates]."""
        batch, (row, place) = self.batch, self._read
        answers = answers.reshape(copies, len(batch.owner), -1).astype(np.float64)
        most = int(batch.candidates.max())
        cell = batch.owner[row] * most + batch.candidate[row, place]
        weighted = batch.weights[row, place] * answers[:, row, place]
        sums = [np.bincount(cell, copy, batch.examples * most).astype(np.float64) for copy in weighted]
        return np.stack(sums).reshape(copies, batch.examples, most)


def _log_sum_exp(scores: Float64Array) -> Float64Array:
    """Of candidates [..., candidates], one after the other: -inf behind an example's own changes no bit."""
    total: Float64Array = np.logaddexp.reduce(scores, axis=-1)
    return total
