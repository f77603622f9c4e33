"""Losses of what a program answers: completion cross-entropy and candidate cross-entropy.

    answers -> scores [copies, examples, candidates] -> losses [copies, examples]

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
    rows = len(batch.owner)
    real = batch.owner >= 0
    if head is not None:
        pooled = outputs["pooled"].reshape(copies, rows, -1)[:, real]
        return head.scores(pooled, batch.rows)
    logprobs = outputs["logprobs"].reshape(copies, rows, -1).astype(np.float64)
    most = int(batch.candidates.max())
    row, slot = np.nonzero((batch.weights != 0) & real[:, None])
    cell = batch.owner[row] * most + batch.candidate[row, slot]
    weighted = batch.weights[row, slot] * logprobs[:, row, slot]
    sums = [np.bincount(cell, copy, batch.examples * most).astype(np.float64) for copy in weighted]
    total = np.stack(sums).reshape(copies, batch.examples, most)
    total[:, np.arange(most) >= batch.candidates[:, None]] = -np.inf
    return total


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


def _log_sum_exp(scores: Float64Array) -> Float64Array:
    highest = scores.max(-1)
    total: Float64Array = highest + np.log(np.exp(scores - highest[..., None]).sum(-1))
    return total
