"""Optimize embeddings until their report equals the one that was sent, then decode them as tokens.

    dlg      squared distance between the reports (Zhu et al. 2019, arXiv 1906.08935)
    cosine   one minus the cosine between them (Geiping et al. 2020, arXiv 2003.14053; for texts LAMP, arXiv
             2202.08827)

A text's tokens are its targets too: an embedding's target distribution follows from its distances to the
vocabulary's embeddings. As in LAMP, embeddings are regularized to the norm of token embeddings.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from server_export.evidence.leak.reports import Report
from server_export.evidence.leak.rows import KnownForm, Rows
from server_export.evidence.leak.settings import MatchingObjective
from server_export.evidence.leak.victim import Victim

# Learning rate relative to the embeddings' standard deviation; it decays to 0.
_STEP = 0.2
# Temperature of the target distribution, relative to the mean squared distance between tokens.
_TEMPERATURE = 0.05
# Weight of the penalty on the embeddings' norms.
_NORM_PENALTY = 0.1


def match(
    victim: Victim, form: KnownForm, report: Report, rows: Rows, objective: MatchingObjective, steps: int
) -> Rows:
    """Return the tokens nearest to embeddings that are optimized from guesses towards a report.

    `rows` holds one guess after the other, each with all rows of the report; labels don't change. Each of the
    `steps` of Adam costs a gradient and a backward pass through it for every row.
    """
    table = victim.embeddings
    # Twice the variance is the mean squared distance between two tokens.
    mean_distance = 2 * float(table.var(0).sum())
    mean_norm = float(table.norm(dim=1).mean())
    embedded = table[rows.tokens].clone().requires_grad_()
    optimizer = torch.optim.Adam([embedded], lr=_STEP * float(table.std()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for _ in range(steps):
        targets = torch.softmax(-_squared_distances(embedded, table) / (_TEMPERATURE * mean_distance), -1)
        gradients = victim.soft_gradient(form, embedded, targets, rows)
        guessed = report.view(gradients).unflatten(0, (-1, report.batch)).mean(1)
        norms = embedded.norm(dim=2).unflatten(0, (-1, report.batch)).mean((1, 2))
        losses = (
            difference(objective, guessed, report.values) + _NORM_PENALTY * (norms / mean_norm - 1).square()
        )
        # Guesses are independent, so the gradient of the sum holds each guess's own gradient.
        (embedded.grad,) = torch.autograd.grad(losses.sum(), [embedded])
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return Rows(_squared_distances(embedded, table).argmin(-1), rows.labels)


def difference(objective: MatchingObjective, guessed: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """Return the distances of guesses' reports f32 [..., values] from the sent one, relative to its norm."""
    if objective == "cosine":
        return 1 - F.cosine_similarity(guessed, sent, dim=-1)
    return ((guessed - sent) / sent.norm()).square().sum(-1)


def _squared_distances(embedded: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return distances [rows, length, vocabulary] of embeddings [rows, length, width] to the vocabulary's."""
    products = embedded @ table.T
    return embedded.square().sum(-1, keepdim=True) - 2 * products + table.square().sum(-1)
