"""Embeddings that are no tokens are moved until their report is the one that was sent, and read as tokens.

    dlg      squared distance of the reports (Zhu et al. 2019, arXiv 1906.08935)
    cosine   one minus their cosine (Geiping et al. 2020, arXiv 2003.14053; for texts LAMP, arXiv 2202.08827)

A text's tokens are its targets too: what an embedding is as a target follows from its distances to the
vocabulary's embeddings. As in LAMP embeddings keep the size that tokens have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from server_export.evidence.leak.reports import Report
from server_export.evidence.leak.rows import KnownForm, Rows
from server_export.evidence.leak.settings import Objective
from server_export.evidence.leak.victim import Victim

# A step of the optimizer as a share of the embeddings' deviation; it falls to 0.
_STEP = 0.2
# Squared distance to a token beside which another is that much less a target, as a share of the usual one.
_NEAR = 0.05
# Weight of the embeddings' size.
_LENGTHS = 0.1


def match(
    victim: Victim, form: KnownForm, report: Report, rows: Rows, objective: Objective, steps: int
) -> Rows:
    """The tokens nearest to embeddings that were moved from guesses towards a report.

    `rows` are those of one guess after the other, each of all rows of the report; their labels stay. Each of
    the `steps` of Adam costs a gradient and a backward pass through it for every row.
    """
    table = victim.embeddings
    # Twice the variance is the mean squared distance of two tokens.
    usual = 2 * float(table.var(0).sum())
    size = float(table.norm(dim=1).mean())
    embedded = table[rows.tokens].clone().requires_grad_()
    optimizer = torch.optim.Adam([embedded], lr=_STEP * float(table.std()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for _ in range(steps):
        targets = torch.softmax(-_squared_distances(embedded, table) / (_NEAR * usual), -1)
        gradients = victim.soft_gradient(form, embedded, targets, rows)
        seen = report.view(gradients).unflatten(0, (-1, report.batch)).mean(1)
        lengths = embedded.norm(dim=2).unflatten(0, (-1, report.batch)).mean((1, 2))
        losses = difference(objective, seen, report.numbers) + _LENGTHS * (lengths / size - 1).square()
        # Guesses have nothing of each other, so that the slope of the sum is each one's own.
        (embedded.grad,) = torch.autograd.grad(losses.sum(), [embedded])
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return Rows(_squared_distances(embedded, table).argmin(-1), rows.labels)


def difference(objective: Objective, seen: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """How far reports of guesses f32 [..., numbers] are from the one that was sent, as shares of its size."""
    if objective == "cosine":
        return 1 - F.cosine_similarity(seen, numbers, dim=-1)
    return ((seen - numbers) / numbers.norm()).square().sum(-1)


def _squared_distances(embedded: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Between embeddings [rows, length, width] and those of the vocabulary: [rows, length, vocabulary]."""
    products = embedded @ table.T
    return embedded.square().sum(-1, keepdim=True) - 2 * products + table.square().sum(-1)
