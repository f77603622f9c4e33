"""One report attacked: everything that may find its rows, one after the other.

    report -> span check, where the gradient is known -> for the best guesses: matched embeddings -> search

The search changes guesses token by token until their report is the one that was sent.

    score of a guess = log-likelihood of the report + log-probability of the text by the model itself

That is its probability after the report, but for a constant. LAMP (Balunovic et al. 2022, arXiv 2202.08827)
adds the same two with a weight, and changes orders. Where noise hides the gradient, what is left is the
prior. Tokens to try come from the gradient of the distance by the embeddings, from the model's own
predictions, and, where neither helps, from the whole vocabulary at one position after another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from server_export.evidence.leak.matching import match
from server_export.evidence.leak.prior import consensus
from server_export.evidence.leak.reports import Report
from server_export.evidence.leak.rows import KnownForm, Rows, joined
from server_export.evidence.leak.settings import LeakSettings
from server_export.evidence.leak.span import read_prefixes, spans_of
from server_export.evidence.leak.victim import Victim

# Guesses that are improved, one after the other, and prefixes that the span check goes on with.
_GUESSES, _PREFIXES = 4, 16

# Changes that are tried at once, of each of their three kinds.
_TRIED = 64
# A likelihood that is this far from a perfect guess's, in logarithms, still asks for a search.
_FOUND = 30.0


def attack(
    victim: Victim,
    form: KnownForm,
    report: Report,
    written: tuple[Rows, torch.Tensor],
    settings: LeakSettings,
    generator: torch.Generator,
) -> Rows:
    """The best guess of a report's rows; `written` are the model's own, with their shares (prior.sample)."""
    rows, shares = written
    # The label of a task is the one whose texts fit best: what iDLG reads off signs (arXiv 2001.02610).
    rows = with_labels(form, rows)
    shares = shares.repeat(form.label_count) - math.log(form.label_count)
    inside = span_rows(victim, form, report, rows)
    if inside is not None:
        rows = joined([rows, inside])
        # The model didn't write them.
        shares = torch.cat([shares, torch.full((len(inside),), -torch.inf, dtype=shares.dtype)])
    return Search(victim, form, report, generator, settings).run(rows, shares)


def span_rows(victim: Victim, form: KnownForm, report: Report, written: Rows) -> Rows | None:
    """Rows that the span check reads from a report; None where it can't say anything.

    A text's last token, which no span shows, is any that a text of `written` has there.
    """
    gradient = report.gradient()
    if gradient is None or form.read * report.batch >= max(module.rank for module in victim.modules):
        return None
    spans = spans_of(victim.modules, gradient)
    if not spans:
        return None
    prefixes = read_prefixes(victim, form, spans, _PREFIXES, _PREFIXES)
    last = written.tokens[:1, prefixes.shape[1] :].expand(len(prefixes), -1)
    rows = Rows(torch.cat([prefixes, last], 1), torch.zeros(len(prefixes), dtype=torch.long))
    return with_labels(form, rows)


def with_labels(form: KnownForm, rows: Rows) -> Rows:
    """Rows with each of the labels, one after the other."""
    return joined(
        [Rows(rows.tokens, torch.full_like(rows.labels, label)) for label in range(form.label_count)]
    )


@dataclass(frozen=True)
class Seen:
    """Rows with what a report shows of each, [rows, numbers], and their log-probabilities, [rows]."""

    rows: Rows
    shown: torch.Tensor
    priors: torch.Tensor

    def __getitem__(self, chosen: slice | torch.Tensor) -> Seen:
        return Seen(self.rows[chosen], self.shown[chosen], self.priors[chosen])

    def with_row(self, row: int, other: Seen) -> Seen:
        """The same with another row of that number."""
        parts = [self[:row], other, self[row + 1 :]]
        shown, priors = (torch.cat([getattr(part, name) for part in parts]) for name in ("shown", "priors"))
        return Seen(joined([part.rows for part in parts]), shown, priors)


@dataclass
class Search:
    """Guesses of a report's rows, the best of them, and all single rows that were tried.

    A guess has as many rows as the report. `tried` counts gradients of rows; `settings` say how many there
    may be.
    """

    victim: Victim
    form: KnownForm
    report: Report
    generator: torch.Generator
    settings: LeakSettings
    tried: int = 0
    _rows: list[Rows] = field(default_factory=list)
    _scores: list[torch.Tensor] = field(default_factory=list)

    def run(self, starts: Rows, shares: torch.Tensor) -> Rows:
        """The guess of the report's rows.

        Args:
            starts: rows to begin with, any number; a batch's guess takes those that fit together.
            shares: [rows], logarithms of how often the model wrote each of them.
        """
        seen = self._see(starts, shares)
        guesses = [self._begin(seen, number) for number in range(min(_GUESSES, len(starts)))]
        guesses = sorted(self._matched(guesses), key=self._score, reverse=True)
        best = guesses[0]
        for number, guess in enumerate(guesses):
            if self._is_found(best):
                break
            budget = self.tried + (self.settings.guesses - self.tried) // (len(guesses) - number)
            best = max(best, self._improved(guess, budget), key=self._score)
        if self.report.batch > 1 or self._is_found(best):
            return best.rows
        return self._consensus()

    def _likelihood(self, guess: Seen) -> float:
        return float(self.report.log_likelihoods(guess.shown.mean(0, keepdim=True)))

    def _score(self, guess: Seen) -> float:
        return self._likelihood(guess) + float(guess.priors.sum())

    def _is_found(self, guess: Seen) -> bool:
        """Whether no other guess can be much better."""
        return not self.report.noise and self._likelihood(guess) > -_FOUND

    def _consensus(self) -> Rows:
        """What all rows that were tried agree on, as likely as they are after the report."""
        rows, scores = joined(self._rows), torch.cat(self._scores)
        keys = torch.cat([rows.tokens, rows.labels[:, None]], 1)
        _, which = torch.unique(keys, dim=0, return_inverse=True)
        first = torch.full((int(which.max()) + 1,), len(which)).scatter_reduce(
            0, which, torch.arange(len(which)), "amin"
        )
        return consensus(rows[first], scores[first])

    def _see(self, rows: Rows, shares: torch.Tensor | None = None) -> Seen:
        """What a report would show of each of some rows.

        Rows that the model wrote stand for those that it didn't too: theirs are at least their `shares`.
        """
        gradients, priors = self.victim.gradients(self.form, rows)
        self.tried += len(rows)
        shown = self.report.view(gradients)
        if self.report.batch == 1:
            self._rows.append(rows)
            weights = priors if shares is None else torch.maximum(priors.double(), shares)
            self._scores.append(self.report.log_likelihoods(shown).double() + weights)
        return Seen(rows, shown, priors)

    def _begin(self, starts: Seen, number: int) -> Seen:
        """A guess of the row that fits best but for some others, and of rows that fit with it."""
        chosen: list[int] = []
        for place in range(self.report.batch):
            # Rows that aren't chosen yet are taken to be like the chosen ones.
            sums = starts.shown + (starts.shown[chosen].sum(0) if chosen else 0)
            scores = self.report.log_likelihoods(sums / (place + 1)) + starts.priors
            order = scores.argsort(descending=True)
            chosen.append(int(order[number if place == 0 else 0]))
        return starts[torch.tensor(chosen)]

    def _matched(self, guesses: list[Seen]) -> list[Seen]:
        """Guesses, or what comes of them by matching embeddings, whichever is better of each."""
        rows, batch = joined([guess.rows for guess in guesses]), self.report.batch
        steps = self.settings.matching_steps
        for objective in self.settings.objectives:
            matched = match(self.victim, self.form, self.report, rows, objective, steps)
            self.tried += steps * len(rows)
            seen = self._see(matched)
            others = [seen[slice(start, start + batch)] for start in range(0, len(matched), batch)]
            guesses = [max(pair, key=self._score) for pair in zip(guesses, others, strict=True)]
        return guesses

    def _improved(self, guess: Seen, budget: int) -> Seen:
        """A guess changed for the better until nothing helps or `budget` gradients were computed in all."""
        stalled, length = 0, self.form.length * self.report.batch
        order = torch.randperm(length, generator=self.generator).tolist()
        while self.tried < budget and not self._is_found(guess) and stalled <= length:
            if stalled == 0:
                proposed = self._proposals(guess)
            else:
                # Any token at one place after the other, until each had its turn since the last success.
                row, position = divmod(order[stalled - 1], self.form.length)
                every = torch.arange(self.victim.vocabulary)
                proposed = [(row, guess.rows[row : row + 1].with_token(position, every))]
            better = max([guess, *(self._best(guess, row, rows) for row, rows in proposed)], key=self._score)
            stalled = 0 if self._score(better) > self._score(guess) else stalled + 1
            guess = better
        return guess

    def _best(self, guess: Seen, row: int, rows: Rows) -> Seen:
        """The best guess with one of `rows` instead of the guess's own row of that number."""
        seen = self._see(rows)
        means = guess.shown.mean(0) + (seen.shown - guess.shown[row]) / len(guess.shown)
        best = int((self.report.log_likelihoods(means) + seen.priors).argmax())
        return guess.with_row(row, seen[best : best + 1])

    def _proposals(self, guess: Seen) -> list[tuple[int, Rows]]:
        """Changes of each row of a guess: tokens, places and labels."""
        by_token = self._token_gradients(guess)
        proposals = []
        for row in range(self.report.batch):
            own = guess.rows[row : row + 1]
            parts = [
                self._replaced(own, by_token[row]),
                self._replaced(own, -self.victim.predictions(self.form, own.tokens[0])),
                self._moved(own),
                with_labels(self.form, own),
            ]
            proposals.append((row, joined(parts)))
        return proposals

    def _replaced(self, own: Rows, costs: torch.Tensor) -> Rows:
        """A row with single tokens replaced by those of the lowest costs f32 [length, vocabulary]."""
        costs = costs.scatter(1, own.tokens[0][:, None], torch.inf)
        overall = costs.flatten().topk(_TRIED // 2, largest=False).indices
        each = costs.topk(-(-_TRIED // (2 * len(costs))), largest=False).indices
        places = torch.arange(len(costs))[:, None] * costs.shape[1]
        chosen = torch.cat([overall, (each + places).flatten()]).unique()
        tokens = own.tokens.repeat(len(chosen), 1)
        tokens[torch.arange(len(chosen)), chosen // costs.shape[1]] = chosen % costs.shape[1]
        return Rows(tokens, own.labels.expand(len(tokens)))

    def _moved(self, own: Rows) -> Rows:
        """A row with two tokens exchanged, or one moved, or the rest shifted from a place on."""
        length, orders = self.form.length, list[list[int]]()
        for _ in range(_TRIED // 2):
            first, second = torch.randint(length, (2,), generator=self.generator).tolist()
            order = list(range(length))
            if len(orders) % 2:
                order[first], order[second] = order[second], order[first]
            else:
                order.insert(second, order.pop(first))
            orders.append(order)
        tokens = own.tokens[0][torch.tensor(orders)]
        return Rows(tokens, own.labels.expand(len(tokens)))

    def _token_gradients(self, guess: Seen) -> torch.Tensor:
        """What every token at every place adds to the distance to first order, [rows, length, vocabulary]."""
        table = self.victim.embeddings
        embedded = table[guess.rows.tokens].requires_grad_()
        targets = F.one_hot(guess.rows.tokens, len(table)).float().requires_grad_()
        gradients = self.victim.soft_gradient(self.form, embedded, targets, guess.rows)
        self.tried += len(gradients)
        distance = self.report.distances(self.report.view(gradients).mean(0))
        by_embedding, by_target = torch.autograd.grad(
            distance, [embedded, targets], allow_unused=True, materialize_grads=True
        )
        return by_embedding @ table.T + by_target
