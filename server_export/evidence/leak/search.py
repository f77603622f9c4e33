"""Attack one report with all methods in order.

    report -> span check, if the gradient is known -> for the best guesses: matched embeddings -> search

The search changes guesses token by token until their report equals the one that was sent.

    score of a guess = log-likelihood of the report + log-probability of the text by the model itself

This is the log of its posterior probability up to a constant. LAMP (Balunovic et al. 2022, arXiv 2202.08827)
adds the same two terms with a weight, and reorders tokens. If noise hides the gradient, the prior decides.
Tokens to try come from the gradient of the distance with respect to the embeddings, from the model's own
predictions, and, if neither helps, from the whole vocabulary at one position after another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from server_export.evidence.leak.matching import match
from server_export.evidence.leak.prior import consensus
from server_export.evidence.leak.reports import Report
from server_export.evidence.leak.rows import KnownForm, Rows, join_rows
from server_export.evidence.leak.settings import LeakSettings
from server_export.evidence.leak.span import compute_spans, read_prefixes
from server_export.evidence.leak.victim import Victim

# Number of guesses that are improved one after the other, and beam width of the span check.
_GUESSES, _PREFIXES = 4, 16

# Number of changes from each of three sources that are tried at once.
_PROPOSALS = 64
# The search ends when the log-likelihood is this close to that of a perfect guess.
_SOLVED = 30.0


def attack(
    victim: Victim,
    form: KnownForm,
    report: Report,
    samples: tuple[Rows, torch.Tensor],
    settings: LeakSettings,
    generator: torch.Generator,
) -> Rows:
    """Return the best guess of a report's rows; `samples` are the model's own rows (see prior.sample)."""
    rows, shares = samples
    # A task's label is the one whose texts fit best; iDLG infers it from signs (arXiv 2001.02610).
    rows = with_labels(form, rows)
    shares = shares.repeat(form.label_count) - math.log(form.label_count)
    span_guesses = span_rows(victim, form, report, rows)
    if span_guesses is not None:
        rows = join_rows([rows, span_guesses])
        # The model didn't generate these rows.
        shares = torch.cat([shares, torch.full((len(span_guesses),), -torch.inf, dtype=shares.dtype)])
    return Search(victim, form, report, generator, settings).run(rows, shares)


def span_rows(victim: Victim, form: KnownForm, report: Report, samples: Rows) -> Rows | None:
    """Return rows that the span check reads from a report, or None if it doesn't apply.

    No span contains a text's last token, so that token comes from a row of `samples`.
    """
    gradient = report.gradient()
    if gradient is None or form.input_length * report.batch >= max(module.rank for module in victim.modules):
        return None
    spans = compute_spans(victim.modules, gradient)
    if not spans:
        return None
    prefixes = read_prefixes(victim, form, spans, _PREFIXES, _PREFIXES)
    last = samples.tokens[:1, prefixes.shape[1] :].expand(len(prefixes), -1)
    rows = Rows(torch.cat([prefixes, last], 1), torch.zeros(len(prefixes), dtype=torch.long))
    return with_labels(form, rows)


def with_labels(form: KnownForm, rows: Rows) -> Rows:
    """Return the rows once for each label, one label after the other."""
    return join_rows(
        [Rows(rows.tokens, torch.full_like(rows.labels, label)) for label in range(form.label_count)]
    )


@dataclass(frozen=True)
class ScoredRows:
    """Rows with their contributions to the report, [rows, values], and their log-probabilities, [rows]."""

    rows: Rows
    contributions: torch.Tensor
    priors: torch.Tensor

    def __getitem__(self, index: slice | torch.Tensor) -> ScoredRows:
        return ScoredRows(self.rows[index], self.contributions[index], self.priors[index])

    def with_row(self, row: int, other: ScoredRows) -> ScoredRows:
        """Return the rows with one row replaced."""
        parts = [self[:row], other, self[row + 1 :]]
        names = ("contributions", "priors")
        contributions, priors = (torch.cat([getattr(part, name) for part in parts]) for name in names)
        return ScoredRows(join_rows([part.rows for part in parts]), contributions, priors)


@dataclass
class Search:
    """A search for a report's rows.

    The number of rows of a guess is that of the report. `gradient_count` counts gradients of rows;
    `settings.guesses` is its limit.
    """

    victim: Victim
    form: KnownForm
    report: Report
    generator: torch.Generator
    settings: LeakSettings
    gradient_count: int = 0
    _rows: list[Rows] = field(default_factory=list)
    _scores: list[torch.Tensor] = field(default_factory=list)

    def run(self, starts: Rows, shares: torch.Tensor) -> Rows:
        """Return the best guess of the report's rows.

        Args:
            starts: any number of rows to start with; a guess of a batch combines those that fit.
            shares: [rows], logarithms of the share of the model's samples that equal each row.
        """
        scored = self._evaluate(starts, shares)
        guesses = [self._initial_guess(scored, number) for number in range(min(_GUESSES, len(starts)))]
        guesses = sorted(self._match_embeddings(guesses), key=self._score, reverse=True)
        best = guesses[0]
        for number, guess in enumerate(guesses):
            if self._is_solved(best):
                break
            budget = self.gradient_count + (self.settings.guesses - self.gradient_count) // (
                len(guesses) - number
            )
            best = max(best, self._improve(guess, budget), key=self._score)
        if self.report.batch > 1 or self._is_solved(best):
            return best.rows
        return self._consensus()

    def _likelihood(self, guess: ScoredRows) -> float:
        return float(self.report.log_likelihoods(guess.contributions.mean(0, keepdim=True)))

    def _score(self, guess: ScoredRows) -> float:
        return self._likelihood(guess) + float(guess.priors.sum())

    def _is_solved(self, guess: ScoredRows) -> bool:
        """Return whether no other guess can be much better."""
        return not self.report.noise and self._likelihood(guess) > -_SOLVED

    def _consensus(self) -> Rows:
        """Return the consensus of all rows that were tried, weighted by their posterior probability."""
        rows, scores = join_rows(self._rows), torch.cat(self._scores)
        keys = torch.cat([rows.tokens, rows.labels[:, None]], 1)
        _, which = torch.unique(keys, dim=0, return_inverse=True)
        first = torch.full((int(which.max()) + 1,), len(which)).scatter_reduce(
            0, which, torch.arange(len(which)), "amin"
        )
        return consensus(rows[first], scores[first])

    def _evaluate(self, rows: Rows, shares: torch.Tensor | None = None) -> ScoredRows:
        """Compute contributions and log-probabilities of rows.

        The weight of a row that the model generated is at least its share of the samples.
        """
        gradients, priors = self.victim.gradients(self.form, rows)
        self.gradient_count += len(rows)
        contributions = self.report.view(gradients)
        if self.report.batch == 1:
            self._rows.append(rows)
            weights = priors if shares is None else torch.maximum(priors.double(), shares)
            self._scores.append(self.report.log_likelihoods(contributions).double() + weights)
        return ScoredRows(rows, contributions, priors)

    def _initial_guess(self, starts: ScoredRows, number: int) -> ScoredRows:
        """Return a guess that starts with the row of rank `number` by fit, and adds rows that fit it."""
        chosen: list[int] = []
        for count in range(self.report.batch):
            # The rows that are still missing are assumed to be like the chosen ones.
            sums = starts.contributions + (starts.contributions[chosen].sum(0) if chosen else 0)
            scores = self.report.log_likelihoods(sums / (count + 1)) + starts.priors
            order = scores.argsort(descending=True)
            chosen.append(int(order[number if count == 0 else 0]))
        return starts[torch.tensor(chosen)]

    def _match_embeddings(self, guesses: list[ScoredRows]) -> list[ScoredRows]:
        """Return each guess or the result of matching its embeddings, whichever is better."""
        rows, batch = join_rows([guess.rows for guess in guesses]), self.report.batch
        steps = self.settings.matching_steps
        for objective in self.settings.objectives:
            matched = match(self.victim, self.form, self.report, rows, objective, steps)
            self.gradient_count += steps * len(rows)
            scored = self._evaluate(matched)
            others = [scored[slice(start, start + batch)] for start in range(0, len(matched), batch)]
            guesses = [max(pair, key=self._score) for pair in zip(guesses, others, strict=True)]
        return guesses

    def _improve(self, guess: ScoredRows, budget: int) -> ScoredRows:
        """Improve a guess until no change helps or `budget` gradients were computed in total."""
        stalled, length = 0, self.form.length * self.report.batch
        order = torch.randperm(length, generator=self.generator).tolist()
        while self.gradient_count < budget and not self._is_solved(guess) and stalled <= length:
            if stalled == 0:
                proposed = self._proposals(guess)
            else:
                # Try every token at one position after another, at each once since the last success.
                row, position = divmod(order[stalled - 1], self.form.length)
                vocabulary = torch.arange(self.victim.vocabulary)
                proposed = [(row, guess.rows[row : row + 1].with_token(position, vocabulary))]
            better = max(
                [guess, *(self._best_replacement(guess, row, rows) for row, rows in proposed)],
                key=self._score,
            )
            stalled = 0 if self._score(better) > self._score(guess) else stalled + 1
            guess = better
        return guess

    def _best_replacement(self, guess: ScoredRows, row: int, rows: Rows) -> ScoredRows:
        """Return the best guess that replaces a row of the guess by one of `rows`."""
        scored = self._evaluate(rows)
        means = guess.contributions.mean(0) + (scored.contributions - guess.contributions[row]) / len(
            guess.contributions
        )
        best = int((self.report.log_likelihoods(means) + scored.priors).argmax())
        return guess.with_row(row, scored[best : best + 1])

    def _proposals(self, guess: ScoredRows) -> list[tuple[int, Rows]]:
        """Return changes of each row of a guess: of tokens, positions and labels."""
        token_gradients = self._token_gradients(guess)
        proposals = []
        for row in range(self.report.batch):
            single = guess.rows[row : row + 1]
            parts = [
                self._replace_tokens(single, token_gradients[row]),
                self._replace_tokens(single, -self.victim.predictions(self.form, single.tokens[0])),
                self._reorder(single),
                with_labels(self.form, single),
            ]
            proposals.append((row, join_rows(parts)))
        return proposals

    def _replace_tokens(self, single: Rows, costs: torch.Tensor) -> Rows:
        """Return copies of a row with one token replaced, for the lowest costs f32 [length, vocabulary]."""
        costs = costs.scatter(1, single.tokens[0][:, None], torch.inf)
        overall = costs.flatten().topk(_PROPOSALS // 2, largest=False).indices
        by_position = costs.topk(-(-_PROPOSALS // (2 * len(costs))), largest=False).indices
        offsets = torch.arange(len(costs))[:, None] * costs.shape[1]
        flat = torch.cat([overall, (by_position + offsets).flatten()]).unique()
        tokens = single.tokens.repeat(len(flat), 1)
        tokens[torch.arange(len(flat)), flat // costs.shape[1]] = flat % costs.shape[1]
        return Rows(tokens, single.labels.expand(len(tokens)))

    def _reorder(self, single: Rows) -> Rows:
        """Return copies of a row with two tokens exchanged or one token moved."""
        length, orders = self.form.length, list[list[int]]()
        for _ in range(_PROPOSALS // 2):
            first, second = torch.randint(length, (2,), generator=self.generator).tolist()
            order = list(range(length))
            if len(orders) % 2:
                order[first], order[second] = order[second], order[first]
            else:
                order.insert(second, order.pop(first))
            orders.append(order)
        tokens = single.tokens[0][torch.tensor(orders)]
        return Rows(tokens, single.labels.expand(len(tokens)))

    def _token_gradients(self, guess: ScoredRows) -> torch.Tensor:
        """Return first-order changes of the distance for every token, [rows, length, vocabulary]."""
        table = self.victim.embeddings
        embedded = table[guess.rows.tokens].requires_grad_()
        targets = F.one_hot(guess.rows.tokens, len(table)).float().requires_grad_()
        gradients = self.victim.soft_gradient(self.form, embedded, targets, guess.rows)
        self.gradient_count += len(gradients)
        distance = self.report.distances(self.report.view(gradients).mean(0))
        by_embedding, by_target = torch.autograd.grad(
            distance, [embedded, targets], allow_unused=True, materialize_grads=True
        )
        return by_embedding @ table.T + by_target
