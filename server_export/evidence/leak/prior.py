"""The guess without a report: texts that the model itself finds likely, and what they agree on."""

from __future__ import annotations

import torch

from server_export.evidence.leak.rows import KnownForm, Rows
from server_export.evidence.leak.victim import Victim

# Rows that are compared, the heaviest.
_COMPARED = 512


def sample(
    victim: Victim, form: KnownForm, count: int, generator: torch.Generator
) -> tuple[Rows, torch.Tensor]:
    """Rows that the model writes after what is known to come before: different ones, and each one's share.

    Without anything before, the first token is any of the vocabulary. Labels are drawn evenly.

    Returns:
        At most `count` rows, and the logarithms of their shares of all that were written, f64 [rows].
    """
    tokens = torch.empty(count, 0, dtype=torch.long)
    if not form.before:
        tokens = torch.randint(victim.vocabulary, (count, 1), generator=generator)
    while tokens.shape[1] < form.length:
        chances = victim.next_logprobs(form, tokens).exp()
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
    tokens, counts = torch.unique(tokens, dim=0, return_counts=True)
    labels = torch.randint(form.label_count, (len(tokens),), generator=generator)
    return Rows(tokens, labels), (counts.double() / count).log()


def consensus(rows: Rows, log_weights: torch.Tensor) -> Rows:
    """The one of some rows whose tokens agree most with all of them, as they weigh: a Rows of one row.

    It is the best guess where tokens in place count: the mean of this over the weights is highest. The rows
    differ; `log_weights` [rows] are logarithms but for a constant.
    """
    best = log_weights.topk(min(_COMPARED, len(rows))).indices
    rows, weights = rows[best], torch.softmax(log_weights[best].double(), 0)
    agreement = torch.zeros(len(rows), dtype=torch.float64)
    for position in range(rows.tokens.shape[1]):
        _, which = rows.tokens[:, position].unique(return_inverse=True)
        share = torch.zeros(int(which.max()) + 1, dtype=torch.float64).index_add(0, which, weights)
        agreement += share[which]
    # Of equal ones the heaviest, which comes first.
    return rows[agreement.argmax().reshape(1)]
