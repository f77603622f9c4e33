"""One report attacked: everything that may find its rows, one after the other.

report -> span check, where the gradient is known -> for the best guesses: matched embeddings -> search
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from server_export.evidence.leak.reports import Report
from server_export.evidence.leak.rows import Form, Rows, joined
from server_export.evidence.leak.search import Search
from server_export.evidence.leak.settings import LeakSettings
from server_export.evidence.leak.span import read_prefixes, spans_of
from server_export.evidence.leak.victim import Victim

# Of prefixes that the span check goes on with.
_BEAM = 16


@dataclass(frozen=True)
class Attack:
    """What came out: the guess, whether the span check gave rows to begin with, and gradients computed."""

    guess: Rows
    spanned: bool
    tried: int


def attack(
    victim: Victim,
    form: Form,
    report: Report,
    written: tuple[Rows, torch.Tensor],
    settings: LeakSettings,
    generator: torch.Generator,
) -> Attack:
    """Try to find a report's rows.

    Args:
        victim: the model.
        form: of the rows.
        report: what was sent.
        written: rows of the model itself, with their shares, of prior.sample.
        settings: how hard to try.
        generator: of what is tried at random.
    """
    rows, shares = written
    # The label of a task is the one whose texts fit best: what iDLG reads off signs (arXiv 2001.02610).
    labels = range(max(len(form.classes), 1))
    rows = joined([rows.with_label(label) for label in labels])
    shares = shares.repeat(len(labels)) - math.log(len(labels))
    found = span_rows(victim, form, report, rows) if settings.span else None
    if found is not None:
        rows = joined([rows, found])
        # The model didn't write them.
        shares = torch.cat([shares, torch.full((len(found),), -torch.inf, dtype=shares.dtype)])
    search = Search(victim, form, report, generator, settings.objectives, settings.matching_steps)
    guess = search.run(rows, shares, settings.beam, settings.guesses)
    return Attack(guess, found is not None, search.tried)


def span_rows(victim: Victim, form: Form, report: Report, written: Rows) -> Rows | None:
    """Rows that the span check reads from a report; None where it can't say anything.

    A text's last token, which no span shows, is any that a text of `written` has there.
    """
    gradient = report.gradient()
    if gradient is None or form.read * report.batch >= max(module.rank for module in victim.modules):
        return None
    spans = spans_of(victim.modules, gradient)
    if not spans.bases:
        return None
    prefixes = read_prefixes(victim, form, spans, _BEAM, _BEAM)
    missing = form.length - prefixes.shape[1]
    last = written.tokens[:1, form.length - missing :].expand(len(prefixes), -1)
    rows = Rows(torch.cat([prefixes, last], 1), torch.zeros(len(prefixes), dtype=torch.long))
    return joined([rows.with_label(label) for label in range(max(len(form.classes), 1))])
