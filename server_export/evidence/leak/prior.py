"""The guess without a report: texts that the model generates, and their consensus."""

from __future__ import annotations

import torch

from server_export.evidence.leak.rows import KnownForm, Rows
from server_export.evidence.leak.victim import Victim

# Number of rows with the largest weights that form the consensus.
_MAX_ROWS = 512


def sample(
    victim: Victim, form: KnownForm, count: int, generator: torch.Generator
) -> tuple[Rows, torch.Tensor]:
    """Sample rows from the model after the known prefix.

    Without a prefix, the first token is uniform over the vocabulary. Labels are uniform too.

    Returns:
        At most `count` distinct rows, and the logarithms of their shares of all samples, f64 [rows].
    """
    tokens = torch.empty(count, 0, dtype=torch.long)
    if not form.prefix:
        tokens = torch.randint(victim.vocabulary, (count, 1), generator=generator)
    while tokens.shape[1] < form.length:
        probabilities = victim.next_logprobs(form, tokens).exp()
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], 1)
    tokens, counts = torch.unique(tokens, dim=0, return_counts=True)
    labels = torch.randint(form.label_count, (len(tokens),), generator=generator)
    return Rows(tokens, labels), (counts.double() / count).log()


def consensus(rows: Rows, log_weights: torch.Tensor) -> Rows:
    """Return the row whose tokens agree most with all rows, weighted by `log_weights`, as Rows of one row.

    It has the highest expected number of tokens at the right position. The rows must be distinct;
    `log_weights` [rows] are logarithms up to a constant.
    """
    best = log_weights.topk(min(_MAX_ROWS, len(rows))).indices
    rows, weights = rows[best], torch.softmax(log_weights[best].double(), 0)
    agreement = torch.zeros(len(rows), dtype=torch.float64)
    for position in range(rows.tokens.shape[1]):
        _, token_ids = rows.tokens[:, position].unique(return_inverse=True)
        share = torch.zeros(int(token_ids.max()) + 1, dtype=torch.float64).index_add(0, token_ids, weights)
        agreement += share[token_ids]
    # argmax returns the first of equals, which has the largest weight.
    return rows[agreement.argmax().reshape(1)]
