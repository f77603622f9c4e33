"""Losses of what an engine answers: completion cross-entropy and candidate cross-entropy.

    answers -> scores [copies, examples, candidates] -> losses [copies, examples]
    tangents -> slopes of the scores [queries, examples, candidates]

A completion's loss is the mean negative log-likelihood of its tokens. A candidate loss is the cross-entropy
of the right candidate among the candidates' scores (MeZO's classification loss, Malladi et al. 2023,
arXiv 2305.17333); the vocabulary's normalizer cancels in it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prge.engine import Array, IntArray
from prge.examples import Batch
from prge.head import Classifier

Float64Array = NDArray[np.float64]


def scores(
    batch: Batch, outputs: dict[str, Array], copies: int, head: Classifier | None = None
) -> Float64Array:
    """Score of every candidate, f64 [copies, examples, candidates]; -inf where an example has fewer.

    Args:
        batch: the rows of one copy.
        outputs: `logprobs` f32 [copies * rows, positions]; with a head, `pooled` f32 [copies * rows, width].
        copies: how many copies the outputs hold.
        head: classification head of an encoder.
    """
    if head is not None:
        return head.scores(_states(batch, outputs["pooled"], copies), batch.rows)
    total = _weighted_sums(batch, outputs["logprobs"], copies)
    total[:, np.arange(total.shape[-1]) >= batch.candidates[:, None]] = -np.inf
    return total


def score_slopes(batch: Batch, outputs: dict[str, Array], head: Classifier | None = None) -> Float64Array:
    """Slope of every score along the directions, f64 [queries, examples, candidates]; 0 where there is none.

    Args:
        batch: the rows of the call.
        outputs: `dlogprobs` f32 [queries, rows, positions], or `dpooled` f32 [queries, rows, width].
        head: classification head of an encoder.
    """
    if head is not None:
        tangents = outputs["dpooled"]
        return head.slopes(_states(batch, tangents, len(tangents)), batch.rows)
    tangents = outputs["dlogprobs"]
    return _weighted_sums(batch, tangents, len(tangents))


def largest_tangent(batch: Batch, outputs: dict[str, Array]) -> float:
    """Largest size of a derivative that was asked for; NaN if one is not a number."""
    read = batch.owner >= 0
    if "dpooled" in outputs:
        asked = outputs["dpooled"][:, read]
    else:
        asked = outputs["dlogprobs"][:, (batch.weights != 0) & read[:, None]]
    return float(np.abs(asked).max(initial=0.0))


def losses(scores: Float64Array, labels: IntArray) -> Float64Array:
    """Loss of every example, f64 [copies, examples]; label -1 marks a completion (one candidate)."""
    examples = np.arange(len(labels))
    chosen = scores[:, examples, np.maximum(labels, 0)]
    return np.where(labels < 0, -chosen, _log_sum_exp(scores) - chosen)


def score_gradient(scores: Float64Array, labels: IntArray) -> Float64Array:
    """Derivative of every example's loss by its scores, f64 [copies, examples, candidates]."""
    examples = np.arange(len(labels))
    gradient = np.exp(scores - _log_sum_exp(scores)[..., None])
    gradient[:, labels < 0] = 0
    gradient[:, examples, np.maximum(labels, 0)] -= 1
    return gradient


def _states(batch: Batch, pooled: Array, copies: int) -> Array:
    """The states of the examples, [copies, examples, width], without those of padding rows."""
    return pooled.reshape(copies, len(batch.owner), -1)[:, batch.owner >= 0]


def _weighted_sums(batch: Batch, answers: Array, copies: int) -> Float64Array:
    """What was read, summed with its weights by candidate, f64 [copies, examples, candidates]."""
    answers = answers.reshape(copies, len(batch.owner), -1).astype(np.float64)
    most = int(batch.candidates.max())
    row, slot = np.nonzero((batch.weights != 0) & (batch.owner >= 0)[:, None])
    cell = batch.owner[row] * most + batch.candidate[row, slot]
    weighted = batch.weights[row, slot] * answers[:, row, slot]
    sums = [np.bincount(cell, copy, batch.examples * most).astype(np.float64) for copy in weighted]
    return np.stack(sums).reshape(copies, batch.examples, most)


def _log_sum_exp(scores: Float64Array) -> Float64Array:
    highest = scores.max(-1)
    total: Float64Array = highest + np.log(np.exp(scores - highest[..., None]).sum(-1))
    return total
