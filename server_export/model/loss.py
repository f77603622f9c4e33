"""The loss of an exact program, from what it read to the loss's derivative by that.

    answers -> scores [rows, candidates] -> shares * softmax(scores) - labels -> derivative by the answers

The loss is sum over examples of share * log-sum-exp(scores) - sum over candidates of label * score: the
cross-entropy of the right candidate with both weights 1 / examples, a completion's loss with a share of 0.
Traced as a part of the graph, these few sums need no second call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prge.contract import Contract


def answer_slopes(contract: Contract, answers: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Derivative of the loss by the answers, f32 of their shape.

    Args:
        contract: of an exact program.
        answers: logprobs [rows, positions] or pooled [rows, width].
        inputs: the contract's inputs from after the adapter on: weights and cells or heads, then offsets,
            labels and shares.
    """
    *scoring, offsets, labels, shares = inputs
    if contract.is_encoder:
        (heads,) = scoring
        rows, width = answers.shape
        scores = torch.bmm(heads, answers.reshape(rows, width, 1)).reshape(offsets.shape) + offsets
        by_score = _by_score(scores, labels, shares)
        return torch.bmm(by_score.reshape(rows, 1, -1), heads).reshape(rows, width)
    weights, cells = scoring
    places = cells.reshape(-1)
    scores = (
        offsets.reshape(-1).scatter_add(0, places, (answers * weights).reshape(-1)).reshape(offsets.shape)
    )
    by_score = _by_score(scores, labels, shares)
    return weights * by_score.reshape(-1).index_select(0, places).reshape(weights.shape)


def _by_score(scores: torch.Tensor, labels: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1) * shares - labels
