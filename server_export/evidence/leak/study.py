"""Run all cases of an attack for every seed and tabulate the scores."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from itertools import permutations
from typing import Any

import torch

from prge.training.privacy_accounting import epsilon_of
from server_export.evidence.leak.prior import consensus, sample
from server_export.evidence.leak.reports import (
    MAX_SOLVED_SIZE,
    ReportView,
    largest_values,
    make_report,
    projections,
)
from server_export.evidence.leak.rows import KnownForm, Rows
from server_export.evidence.leak.search import attack
from server_export.evidence.leak.settings import AttackCase
from server_export.evidence.leak.target import AttackTarget
from server_export.evidence.leak.victim import Victim

Record = dict[str, Any]
Score = dict[str, float]

# Maximum number of projected gradients that an attack reads, unless more determine the gradient.
MAX_VALUES = 1000
# Delta of the reported differential privacy.
DELTA = 1e-5


def run_study(target: AttackTarget, log: Callable[[str], None]) -> dict[str, Any]:
    """Attack every case; `log` is called with a line about each.

    Returns:
        `recovered_exact`, `recovered_top`, `recovered_scalars` for the reports that are attacked, and
        `recovered_prior`: share of tokens at the right position in the base case, mean over reports and
        seeds; `case`; `table`, a record for each case; `prior`, a record for each length and batch.

    Raises:
        PrgeError: a case can't be attacked, because there are too few rows or the rank doesn't fit.
    """
    settings, study = target.settings, _Study(target)
    table, priors = [], dict[tuple[int, int], Record]()
    for case in settings.cases():
        scores, prior_scores = study.attack(case)
        table.append({**asdict(case), "epsilon": _epsilon(case), **scores})
        size = {"length": case.length, "batch": case.batch}
        priors.setdefault((case.length, case.batch), {**size, **prior_scores})
        log(format_record(table[-1], prior_scores))
    base_cases = [next(line for line in table if line["report"] == report) for report in settings.reports]
    first = (settings.lengths[0], settings.batches[0])
    return {
        **{f"recovered_{line['report']}": line["tokens"]["mean"] for line in base_cases},
        "recovered_prior": priors[first]["tokens"]["mean"],
        "case": {name: base_cases[-1][name] for name in settings.lists},
        "table": table,
        "prior": list(priors.values()),
    }


def format_record(line: Record, prior_scores: Record) -> str:
    """Format a record of the table for a terminal."""
    what = f"{line['report']:<8} rank {line['rank']:<3} length {line['length']:<3} batch {line['batch']:<2}"
    steps = f"{line['queries']} x {line['steps']:,}" if line["report"] == "scalars" else ""
    epsilon = "none" if line["epsilon"] is None else f"{line['epsilon']:,.3g}"
    noise = f"noise {line['noise']:g} (epsilon {epsilon})" if line["noise"] else "no noise"
    return (
        f"{what} {steps:<10} {noise:<28} tokens {line['tokens']['mean']:>4.0%}, without the report "
        f"{prior_scores['tokens']['mean']:>4.0%}; whole rows {line['whole']['mean']:>4.0%}"
    )


class _Study:
    """Attacks on the reports of a target, with cached models and samples."""

    def __init__(self, target: AttackTarget) -> None:
        self._target = target
        self._victim = cache(target.victim)
        self._samples = cache(self._sample)

    def attack(self, case: AttackCase) -> tuple[Record, Record]:
        """Return the scores of a case, and those of guesses without a report."""
        target, settings = self._target, self._target.settings
        scores, prior_scores = list[Score](), list[Score]()
        for seed in settings.seeds:
            victim = self._victim(case.rank, seed)
            form, batches = target.reports(case.length, case.batch, seed)
            samples = self._samples(case.rank, seed, form)
            prior_guess = consensus(*samples)
            seed_view = _projections(victim, case, seed) if case.report == "scalars" else ReportView()
            pairs = []
            for number, rows in enumerate(batches):
                generator = torch.Generator().manual_seed(seed * len(batches) + number)
                gradients, _ = victim.gradients(form, rows)
                view = largest_values(gradients, settings.top_share) if case.report == "top" else seed_view
                report = make_report(view, gradients, case.noise, generator)
                pairs.append((attack(victim, form, report, samples, settings, generator), rows))
            scores.append(mean_score([score(guess, rows) for guess, rows in pairs]))
            prior_guesses = [prior_guess[torch.zeros(len(rows), dtype=torch.long)] for rows in batches]
            prior_scores.append(
                mean_score(
                    [score(guess, rows) for guess, (_, rows) in zip(prior_guesses, pairs, strict=True)]
                )
            )
        return _over_seeds(scores), _over_seeds(prior_scores)

    def _sample(self, rank: int, seed: int, form: KnownForm) -> tuple[Rows, torch.Tensor]:
        """Return rows that the model generates, with their shares."""
        generator = torch.Generator().manual_seed(seed)
        return sample(self._victim(rank, seed), form, self._target.settings.samples, generator)


def score(guess: Rows, rows: Rows) -> Score:
    """Return the shares of a report's rows that a guess has right, for the best order of its rows.

    Returns:
        `tokens` at the right position, `whole` rows, and `label`s of a task (1 for texts).
    """
    same, order = max(
        ((guess.tokens[list(order)] == rows.tokens, list(order)) for order in permutations(range(len(rows)))),
        key=lambda pair: int(pair[0].sum()),
    )
    right = guess.labels[order] == rows.labels
    shares = {"tokens": same, "whole": same.all(1), "label": right}
    return {name: float(share.float().mean()) for name, share in shares.items()}


def mean_score(scores: Sequence[Score]) -> Score:
    """Return the mean of each measure."""
    return {name: statistics.mean(each[name] for each in scores) for name in scores[0]}


def _over_seeds(scores: Sequence[Score]) -> Record:
    """Return mean, minimum and maximum over seeds for every measure."""
    columns = {name: [each[name] for each in scores] for name in scores[0]}
    return {
        name: {"mean": statistics.mean(column), "least": min(column), "most": max(column)}
        for name, column in columns.items()
    }


def _projections(victim: Victim, case: AttackCase, seed: int) -> ReportView:
    """Return the projections that an attack reads: those of all steps, or of enough steps."""
    steps, enough = case.steps, MAX_VALUES
    if not case.noise and victim.size <= MAX_SOLVED_SIZE and case.steps * case.queries >= victim.size:
        enough = victim.size
    return projections(victim.modules, seed, min(steps, -(-enough // case.queries)), case.queries)


def _epsilon(case: AttackCase) -> float | None:
    """Return epsilon for a row that takes part in all steps, or None without noise.

    The indices of the largest values are sent without noise, so the report `top` has no epsilon.
    """
    if not case.noise or case.report == "top":
        return None
    epsilon = epsilon_of(((case.noise, case.steps),), DELTA)
    return None if math.isinf(epsilon) else epsilon
