"""Losses as functions of scores, and the chain rule between an engine's outputs and a loss.

    outputs -> scores [copies, examples, candidates] -> losses [copies, examples]

Scores are weighted sums of log-probabilities (examples.py); those of an encoder come from its classification
head. An objective depends on scores alone, so it works with every estimator and on every engine:

    differences   use the losses of all copies
    tangents      multiply the gradients with respect to the scores by the tangents of the scores
    exact         propagate the gradients with respect to the scores back to the outputs, where the engine
                  continues
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
    """A loss as a function of the scores of candidates, f64 [copies, examples, candidates].

    An example with fewer candidates than others has scores of -inf after its own. If a loss also depends on
    other examples of the step, that part must be the same for all copies of the adapter, and the gradients
    treat it as a constant.

    Attributes:
        is_separable: whether the loss of an example is independent of the others, so that a step may compute
            its examples in microbatches.
    """

    is_separable: ClassVar[bool]

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """Return the loss of every example, f64 [copies, examples]."""
        ...

    def gradients(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """Return the gradient of each example's loss with respect to its scores, f64 in their shape."""
        ...


class CrossEntropy:
    """Implements Objective: the negative log-likelihood of completions, the cross-entropy of candidates.

    The loss of a completion is the mean negative log-likelihood of its tokens. The loss of an example with
    candidates is the cross-entropy of the right one among their scores, MeZO's classification loss (Malladi
    et al. 2023, arXiv 2305.17333), in which the normalizer of the vocabulary cancels.
    """

    is_separable: ClassVar = True

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        labels = labels_of(examples)
        chosen = scores[:, np.arange(len(labels)), np.maximum(labels, 0)]
        return np.where(labels < 0, -chosen, _log_sum_exp(scores) - chosen)

    def gradients(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        labels = labels_of(examples)
        gradients = np.exp(scores - _log_sum_exp(scores)[..., None])
        gradients[:, labels < 0] = 0
        gradients[:, np.arange(len(labels)), np.maximum(labels, 0)] -= 1
        return gradients


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class Loss:
    """The losses of examples for given outputs of an engine, and their derivatives.

    Attributes:
        examples: the examples.
        outputs: log-probabilities [copies, targets], or an encoder's pooled states [copies, sequences,
            width].
        objective: the loss as a function of scores.
        head: computes scores from an encoder's pooled states; None for a decoder.
    """

    examples: Sequence[Example]
    outputs: Array
    objective: Objective = CROSS_ENTROPY
    head: Classifier | None = None

    @cached_property
    def scores(self) -> Float64Array:
        """Scores of all candidates, f64 [copies, examples, candidates]; -inf where an example has fewer."""
        if self.head is not None:
            return self.head.scores(self.outputs, self._rows)
        total = self._weighted_sums(self.outputs)
        total[:, np.arange(total.shape[-1]) >= self._candidates[:, None]] = -np.inf
        return total

    @property
    def losses(self) -> Float64Array:
        """Weighted loss of every example, f64 [copies, examples]."""
        return self.objective.losses(self.scores, self.examples) * weights_of(self.examples)

    @cached_property
    def grad_scores(self) -> Float64Array:
        """Gradient of each weighted loss with respect to its scores, f64 [copies, examples, candidates]."""
        return self.objective.gradients(self.scores, self.examples) * weights_of(self.examples)[:, None]

    def jvp(self, tangents: Array) -> Float64Array:
        """Return the derivative of every loss along each direction, f64 [queries, examples]; for one copy.

        Args:
            tangents: tangents of the outputs, [queries, targets] or [queries, sequences, width].
        """
        if self.head is None:
            score_tangents = self._weighted_sums(tangents)
        else:
            score_tangents = self.head.jvp(tangents, self._rows)
        derivatives: Float64Array = (self.grad_scores * score_tangents).sum(-1)
        return derivatives

    @property
    def grad_outputs(self) -> Float64Array:
        """Gradient of the summed losses with respect to the outputs, f64 in their shape; for one copy."""
        (grad_scores,) = self.grad_scores
        if self.head is not None:
            weights, _ = self.head.layers(self._rows)
            grad_pooled: Float64Array = np.matmul(grad_scores[:, None], weights.astype(np.float64))[:, 0]
            return grad_pooled
        grad_logprobs: Float64Array = self._weights * grad_scores.ravel()[self._cells]
        return grad_logprobs

    def head_gradient(self, head: Head) -> Float64Array:
        """Return the gradient of the summed losses with respect to a head's values, f64 [size]."""
        return head.gradient(self.outputs, self.grad_scores)

    @cached_property
    def _rows(self) -> list[int]:
        return [example.row for example in self.examples]

    @cached_property
    def _candidates(self) -> IntArray:
        return np.array([example.candidates for example in self.examples], np.int64)

    @cached_property
    def _weights(self) -> Float64Array:
        """The weight of every target, f64 [targets]."""
        return np.array([target.weight for target in _targets(self.examples)], np.float64)

    @cached_property
    def _cells(self) -> IntArray:
        """Each target's candidate: index into flattened scores [examples, candidates], i64 [targets]."""
        width = int(self._candidates.max())
        return np.array(
            [
                index * width + target.candidate
                for index, example in enumerate(self.examples)
                for target in _targets([example])
            ],
            np.int64,
        )

    def _weighted_sums(self, outputs: Array) -> Float64Array:
        """Return the weighted sum of each candidate's targets, f64 [copies, examples, candidates]."""
        width = int(self._candidates.max())
        weighted = self._weights * outputs.astype(np.float64)
        size = len(self.examples) * width
        sums = [np.bincount(self._cells, copy, size).astype(np.float64) for copy in weighted]
        return np.stack(sums).reshape(len(outputs), len(self.examples), width)


def _targets(examples: Sequence[Example]) -> Iterator[Target]:
    return (target for sequence in sequences_of(examples) for target in sequence.targets)


def _log_sum_exp(scores: Float64Array) -> Float64Array:
    """Return the log-sum-exp over candidates, in order: -inf after the last ones changes no bit."""
    total: Float64Array = np.logaddexp.reduce(scores, axis=-1)
    return total
