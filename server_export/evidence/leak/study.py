"""All cases of an attack, for every seed, as a table."""

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
from server_export.evidence.leak.reports import MOST_SOLVED, ReportView, directions_of, largest, sent
from server_export.evidence.leak.rows import KnownForm, Rows
from server_export.evidence.leak.search import attack
from server_export.evidence.leak.settings import Case
from server_export.evidence.leak.target import AttackTarget
from server_export.evidence.leak.victim import Victim

Line = dict[str, Any]
Score = dict[str, float]

# Scalars that an attack reads of a report with more, unless they determine the gradient.
MOST_NUMBERS = 1000
# Of the differential privacy whose epsilon is told.
DELTA = 1e-5


def run_study(target: AttackTarget, log: Callable[[str], None]) -> dict[str, Any]:
    """Attack every case; `log` takes a line about each.

    Returns:
        `recovered_exact`, `recovered_top`, `recovered_scalars` of the reports that are attacked, and
        `recovered_prior`: share of tokens in place, mean over reports and seeds, in the case of the middle;
        `case`; `table`, a line for each case; `prior`, a line for each length and batch.

    Raises:
        PrgeError: a case can't be attacked: too few rows, a rank that doesn't fit.
    """
    settings, study = target.settings, _Study(target)
    table, priors = [], dict[tuple[int, int], Line]()
    for case in settings.cases():
        scores, blind = study.attack(case)
        table.append({**asdict(case), "epsilon": _epsilon(case), **scores})
        size = {"length": case.length, "batch": case.batch}
        priors.setdefault((case.length, case.batch), {**size, **blind})
        log(text_of(table[-1], blind))
    middle = [next(line for line in table if line["report"] == report) for report in settings.reports]
    first = (settings.lengths[0], settings.batches[0])
    return {
        **{f"recovered_{line['report']}": line["tokens"]["mean"] for line in middle},
        "recovered_prior": priors[first]["tokens"]["mean"],
        "case": {name: middle[-1][name] for name in settings.lists},
        "table": table,
        "prior": list(priors.values()),
    }


def text_of(line: Line, blind: Line) -> str:
    """A line of the table for a terminal."""
    what = f"{line['report']:<8} rank {line['rank']:<3} length {line['length']:<3} batch {line['batch']:<2}"
    steps = f"{line['queries']} x {line['steps']:,}" if line["report"] == "scalars" else ""
    epsilon = "none" if line["epsilon"] is None else f"{line['epsilon']:,.3g}"
    noise = f"noise {line['noise']:g} (epsilon {epsilon})" if line["noise"] else "no noise"
    return (
        f"{what} {steps:<10} {noise:<28} tokens {line['tokens']['mean']:>4.0%}, without the report "
        f"{blind['tokens']['mean']:>4.0%}; whole rows {line['whole']['mean']:>4.0%}"
    )


class _Study:
    """Attacks on the reports of a target; what its cases share is computed once."""

    def __init__(self, target: AttackTarget) -> None:
        self._target = target
        self._victim = cache(target.victim)
        self._written = cache(self._sample)

    def attack(self, case: Case) -> tuple[Line, Line]:
        """Scores of a case, and of the guesses without a report."""
        target, settings = self._target, self._target.settings
        scores, blind = list[Score](), list[Score]()
        for seed in settings.seeds:
            victim = self._victim(case.rank, seed)
            form, batches = target.reports(case.length, case.batch, seed)
            written = self._written(case.rank, seed, form)
            unaided = consensus(*written)
            along = _directions(victim, case, seed) if case.report == "scalars" else ReportView()
            pairs = []
            for number, rows in enumerate(batches):
                generator = torch.Generator().manual_seed(seed * len(batches) + number)
                gradients, _ = victim.gradients(form, rows)
                view = largest(gradients, settings.top_share) if case.report == "top" else along
                report = sent(view, gradients, case.noise, generator)
                pairs.append((attack(victim, form, report, written, settings, generator), rows))
            scores.append(mean_score([score(guess, rows) for guess, rows in pairs]))
            every = [unaided[torch.zeros(len(rows), dtype=torch.long)] for rows in batches]
            blind.append(
                mean_score([score(guess, rows) for guess, (_, rows) in zip(every, pairs, strict=True)])
            )
        return _over_seeds(scores), _over_seeds(blind)

    def _sample(self, rank: int, seed: int, form: KnownForm) -> tuple[Rows, torch.Tensor]:
        """What the model itself would write."""
        generator = torch.Generator().manual_seed(seed)
        return sample(self._victim(rank, seed), form, self._target.settings.samples, generator)


def score(guess: Rows, rows: Rows) -> Score:
    """Shares of a report's rows that a guess has, in the order in which most tokens stand in their place.

    Returns:
        `tokens` in their place, `whole` rows, `label`s of a task, 1 of texts.
    """
    same, order = max(
        ((guess.tokens[list(order)] == rows.tokens, list(order)) for order in permutations(range(len(rows)))),
        key=lambda pair: int(pair[0].sum()),
    )
    right = guess.labels[order] == rows.labels
    shares = {"tokens": same, "whole": same.all(1), "label": right}
    return {name: float(share.float().mean()) for name, share in shares.items()}


def mean_score(scores: Sequence[Score]) -> Score:
    """Mean of each measure."""
    return {name: statistics.mean(each[name] for each in scores) for name in scores[0]}


def _over_seeds(scores: Sequence[Score]) -> Line:
    """Every measure: mean over seeds, the least and the most of them."""
    columns = {name: [each[name] for each in scores] for name in scores[0]}
    return {
        name: {"mean": statistics.mean(column), "least": min(column), "most": max(column)}
        for name, column in columns.items()
    }


def _directions(victim: Victim, case: Case, seed: int) -> ReportView:
    """Those of the steps that an attack reads: all, or enough where there are more."""
    steps, enough = case.steps, MOST_NUMBERS
    if not case.noise and victim.size <= MOST_SOLVED and case.steps * case.queries >= victim.size:
        enough = victim.size
    return directions_of(victim.modules, seed, min(steps, -(-enough // case.queries)), case.queries)


def _epsilon(case: Case) -> float | None:
    """What a row that takes part in all steps pays; None without noise.

    The places of the largest values are sent as they are, so that no noise on the values makes them private.
    """
    if not case.noise or case.report == "top":
        return None
    epsilon = epsilon_of(((case.noise, case.steps),), DELTA)
    return None if math.isinf(epsilon) else epsilon
