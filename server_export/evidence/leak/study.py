"""All cases of an attack, for every seed, as a table."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from prge.learning.accounting import epsilon_of
from server_export.evidence.leak.attack import Attack, attack
from server_export.evidence.leak.opening import Target
from server_export.evidence.leak.prior import consensus, sample
from server_export.evidence.leak.reports import (
    MOST_SOLVED,
    Report,
    directions_of,
    exact,
    noised,
    scalars,
    top,
)
from server_export.evidence.leak.rows import Form, Rows
from server_export.evidence.leak.scores import Score, mean_score, score
from server_export.evidence.leak.settings import Case, LeakSettings
from server_export.evidence.leak.victim import Victim

Line = dict[str, Any]

# Scalars that an attack reads of a report with more, unless they determine the gradient.
MOST_NUMBERS = 1000
_MEASURES = ("tokens", "bag", "whole", "rouge1", "rouge2", "rouge_l", "label")


def run_study(target: Target, tell: Callable[[str], None]) -> dict[str, Any]:
    """Attack every case.

    Args:
        target: model and rows.
        tell: is given a line about every case.

    Returns:
        `recovered_exact`, `recovered_top`, `recovered_scalars` where asked for, and `recovered_prior`: share
        of tokens in place, mean over reports and seeds, in the case of the middle; `case`; `table`, a line
        for each case; `prior`, a line for each length and batch.

    Raises:
        PrgeError: a case can't be attacked: too few rows, a rank that doesn't fit.
    """
    settings = target.settings
    cases = list(settings.cases())
    scenes = _Scenes(target)
    table, priors = [], dict[tuple[int, int], Line]()
    for case in cases:
        line, blind = _attack_case(target, scenes, case)
        line["epsilon"] = _epsilon(case, settings.delta)
        table.append(line)
        priors.setdefault((case.length, case.batch), {"length": case.length, "batch": case.batch} | blind)
        tell(text_of(line, blind))
    middle = [next(line for line in table if line["report"] == report) for report in settings.reports]
    first = (settings.lengths[0], settings.batches[0])
    return {
        **{f"recovered_{line['report']}": line["tokens"]["mean"] for line in middle},
        "recovered_prior": priors[first]["tokens"]["mean"],
        "case": {name: middle[-1][name] for name in ("rank", "length", "batch", "queries", "steps", "noise")},
        "table": table,
        "prior": list(priors.values()),
    }


def text_of(line: Line, blind: Line) -> str:
    """A line of the table for a terminal."""
    what = f"{line['report']:<8} rank {line['rank']:<3} length {line['length']:<3} batch {line['batch']:<2}"
    steps = f"{line['queries']} x {line['steps']:,}" if line["report"] == "scalars" else ""
    noise = f"noise {line['noise']:g} (epsilon {_short(line['epsilon'])})" if line["noise"] else "no noise"
    return (
        f"{what} {steps:<10} {noise:<28} tokens {line['tokens']['mean']:>4.0%}, without the report "
        f"{blind['tokens']['mean']:>4.0%}; whole rows {line['whole']['mean']:>4.0%}"
    )


def _short(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:,.3g}"


@dataclass(frozen=True)
class _Scene:
    """What the attacks of a seed on rows of one length share: rows, and what the model itself would write."""

    victim: Victim
    form: Form
    batches: list[Rows]
    written: tuple[Rows, torch.Tensor]


class _Scenes:
    """Scenes by rank, length, batch and seed; each is made once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._victims: dict[tuple[int, int], Victim] = {}
        self._written: dict[tuple[int, int, int], tuple[Rows, torch.Tensor]] = {}

    def of(self, case: Case, seed: int) -> _Scene:
        """The scene of a case and seed."""
        target, adapted = self._target, (case.rank, seed)
        if adapted not in self._victims:
            self._victims[adapted] = target.victim(*adapted)
        victim = self._victims[adapted]
        form, batches = target.reports(case.length, case.batch, seed)
        which = (*adapted, case.length)
        if which not in self._written:
            generator = torch.Generator().manual_seed(seed)
            self._written[which] = sample(victim, form, target.settings.samples, generator)
        return _Scene(victim, form, batches, self._written[which])


def _attack_case(target: Target, scenes: _Scenes, case: Case) -> tuple[Line, Line]:
    """A line of the table, and that of the guesses without a report."""
    settings, begin = target.settings, time.perf_counter()
    scores, blind, attacks = list[list[Score]](), list[list[Score]](), list[Attack]()
    size = numbers = 0
    for seed in settings.seeds:
        scene = scenes.of(case, seed)
        victim, form, size = scene.victim, scene.form, scene.victim.size
        directions = _directions(victim, case, seed) if case.report == "scalars" else None
        unaided = consensus(*scene.written)
        scores.append([])
        blind.append([])
        for number, rows in enumerate(scene.batches):
            generator = torch.Generator().manual_seed(seed * len(scene.batches) + number)
            gradients, _ = victim.gradients(form, rows)
            report = _report(gradients, case, settings, directions)
            if case.noise:
                report = noised(report, gradients, case.noise, generator)
            numbers = len(report.numbers)
            found = attack(victim, form, report, scene.written, settings, generator)
            attacks.append(found)
            scores[-1].append(score(found.guess, rows, target.decode))
            every = unaided[torch.zeros(len(rows), dtype=torch.long)]
            blind[-1].append(score(every, rows, target.decode))
    costs = {
        "size": size,
        "numbers": case.steps * case.queries if case.report == "scalars" else numbers,
        "numbers_read": numbers,
        "spanned": sum(each.spanned for each in attacks) / len(attacks),
        "tried": statistics.mean(each.tried for each in attacks),
        "reports": len(attacks),
        "seconds": time.perf_counter() - begin,
    }
    return asdict(case) | costs | _over_seeds(scores), _over_seeds(blind)


def _report(
    gradients: torch.Tensor, case: Case, settings: LeakSettings, directions: torch.Tensor | None
) -> Report:
    if case.report == "exact":
        return exact(gradients)
    if case.report == "top":
        return top(gradients, settings.top_share)
    assert directions is not None
    return scalars(gradients, directions, case.queries)


def _directions(victim: Victim, case: Case, seed: int) -> torch.Tensor:
    """Those of the steps that an attack reads: all, or enough where there are more."""
    steps, enough = case.steps, MOST_NUMBERS
    if not case.noise and victim.size <= MOST_SOLVED and case.steps * case.queries >= victim.size:
        enough = victim.size
    return directions_of(victim.modules, seed, min(steps, -(-enough // case.queries)), case.queries)


def _epsilon(case: Case, delta: float) -> float | None:
    """What a row that takes part in all steps pays; None without noise.

    The places of the largest values are told as they are, so that no noise on the values makes them private.
    """
    if not case.noise or case.report == "top":
        return None
    epsilon = epsilon_of(((case.noise, case.steps),), delta)
    return None if math.isinf(epsilon) else epsilon


def _over_seeds(scores: Sequence[Sequence[Score]]) -> Line:
    """Every measure: mean over seeds of the means over reports, the least and the most of them."""
    means = [asdict(mean_score(of_seed)) for of_seed in scores]
    columns = {name: [mean[name] for mean in means] for name in _MEASURES}
    return {
        name: {"mean": statistics.mean(column), "least": min(column), "most": max(column)}
        for name, column in columns.items()
    }
