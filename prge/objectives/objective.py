"""Losses as functions of scores, and the one chain rule between an engine's outputs and a loss.

    outputs -> scores [copies, examples, candidates] -> losses [copies, examples]

Scores are weighted sums of log-probabilities (examples.py), or what an encoder's head makes of its states.
An objective sees scores alone, so it runs with every estimator and on every engine:

    differences   read the losses of all copies
    tangents      slopes by the scores, times how the scores change along a direction
    exact         slopes by the scores, taken back to the outputs, from where the engine goes on
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from prge.engine import Array, Float64Array, IntArray, Target
from prge.objectives.classification_head import Classifier, Head
from prge.objectives.examples import Example, labels_of, sequences_of, weights_of


class Objective(Protocol):
    """A loss of examples by the scores of their candidates, f64 [copies, examples, candidates].

    An example with fewer candidates than others has scores of -inf behind its own. The copies are all that a
    step compares: what a loss takes of other examples is the same for all copies, and its slopes leave it
    out. `is_separate` tells that it takes nothing of others: a step may compute its examples in parts.
    """

    is_separable: ClassVar[bool]

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

    is_separable: ClassVar = True

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
class Loss:
    """The loss of examples at the outputs of an engine for their sequences, and its derivatives.

    `outputs`: [copies, targets] log-probabilities, or [copies, sequences, width] of an encoder, whose `head`
    scores its states.
    """

    examples: Sequence[Example]
    outputs: Array
    objective: Objective = CROSS_ENTROPY
    head: Classifier | None = None

    @cached_property
    def scores(self) -> Float64Array:
        """Score of every candidate, f64 [copies, examples, candidates]; -inf where an example has fewer."""
        if self.head is not None:
            return self.head.scores(self.outputs, self._rows)
        total = self._weighted_sums(self.outputs)
        total[:, np.arange(total.shape[-1]) >= self._candidates[:, None]] = -np.inf
        return total

    @property
    def losses(self) -> Float64Array:
        """Loss of every example with its weight, f64 [copies, examples]."""
        return self.objective.losses(self.scores, self.examples) * weights_of(self.examples)

    @cached_property
    def by_score(self) -> Float64Array:
        """Derivative of every example's loss by its scores, f64 [copies, examples, candidates]."""
        return self.objective.slopes(self.scores, self.examples) * weights_of(self.examples)[:, None]

    def along(self, derivatives: Array) -> Float64Array:
        """Derivative of every example's loss along directions, f64 [queries, examples]; of one copy.

        Args:
            derivatives: of the outputs, [queries, targets] or [queries, sequences, width].
        """
        if self.head is None:
            changes = self._weighted_sums(derivatives)
        else:
            changes = self.head.slopes(derivatives, self._rows)
        found: Float64Array = (self.by_score * changes).sum(-1)
        return found

    @property
    def grad_outputs(self) -> Float64Array:
        """Derivative of the sum of all losses by the outputs of one copy, f64 in their shape."""
        (by_score,) = self.by_score
        if self.head is not None:
            weights, _ = self.head.layers(self._rows)
            found: Float64Array = np.matmul(by_score[:, None], weights.astype(np.float64))[:, 0]
            return found
        by_target: Float64Array = self._weights * by_score.ravel()[self._cells]
        return by_target

    def by_head(self, head: Head) -> Float64Array:
        """Derivative of the sum of all losses by a head's values, f64 [size]; summed over copies."""
        return head.gradient(self.outputs, self.by_score)

    @cached_property
    def _rows(self) -> list[int]:
        return [example.row for example in self.examples]

    @cached_property
    def _candidates(self) -> IntArray:
        return np.array([example.candidates for example in self.examples], np.int64)

    @cached_property
    def _weights(self) -> Float64Array:
        """Of every target, f64 [targets]."""
        return np.array([target.weight for target in _targets(self.examples)], np.float64)

    @cached_property
    def _cells(self) -> IntArray:
        """Which of all candidates each target belongs to, i64 [targets], with as many for each example."""
        most = int(self._candidates.max())
        return np.array(
            [
                index * most + target.candidate
                for index, example in enumerate(self.examples)
                for target in _targets([example])
            ],
            np.int64,
        )

    def _weighted_sums(self, outputs: Array) -> Float64Array:
        """What was read, summed with its weights by candidate, f64 [copies, examples, candidates]."""
        most = int(self._candidates.max())
        weighted = self._weights * outputs.astype(np.float64)
        size = len(self.examples) * most
        sums = [np.bincount(self._cells, copy, size).astype(np.float64) for copy in weighted]
        return np.stack(sums).reshape(len(outputs), len(self.examples), most)


def _targets(examples: Sequence[Example]) -> Iterator[Target]:
    return (target for sequence in sequences_of(examples) for target in sequence.targets)


def _log_sum_exp(scores: Float64Array) -> Float64Array:
    """Of candidates [..., candidates], one after the other: -inf behind an example's own changes no bit."""
    total: Float64Array = np.logaddexp.reduce(scores, axis=-1)
    return total
