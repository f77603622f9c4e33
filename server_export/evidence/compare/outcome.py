"""Evaluate a stored comparison: its target, the figures of every method, and the winner of each figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server_export.evidence.compare.analysis import (
    Interval,
    Spread,
    best_of,
    first_crossing,
    is_tie,
    paired_ratio,
)

REFERENCE = "backprop-lora-fa"
MEGABYTE = 1e6

Result = Mapping[str, Any]
Run = Mapping[str, Any]


@dataclass(frozen=True)
class LossTarget:
    """The loss to reach on development rows, or None without a target, and a description of its origin."""

    value: float | None
    origin: str


@dataclass(frozen=True)
class Figure:
    """A figure that methods are compared by; differences up to a share `noise` of it are ignored."""

    key: str
    title: str
    unit: str = ""
    lower_is_better: bool = True
    as_ratio: bool = True
    noise: float = 0.0
    of_quality: bool = False


FIGURES = (
    Figure("seconds_to_target", "seconds of training to the target", "s", of_quality=True),
    Figure("forward_passes_to_target", "forward passes to the target", "forward_passes", of_quality=True),
    Figure("test_accuracy", "accuracy on test rows", "%", False, as_ratio=False, of_quality=True),
    Figure("test_loss", "loss on test rows", as_ratio=False, of_quality=True),
    Figure("peak_mb", "peak memory over an idle runner", "MB", noise=0.02),
    Figure("own_peak_mb", "peak memory over its own process idle", "MB", noise=0.02),
    Figure("activation_mb", "memory of steps over the loaded model", "MB", noise=0.02),
    Figure("tokens_per_second", "tokens of training rows a second", lower_is_better=False),
)


def has_quality(result: Result) -> bool:
    """Return whether losses are meaningful; with random weights, only time and memory are."""
    return not str(result["settings"]["model"]).startswith("random:")


def reported_figures(result: Result) -> list[Figure]:
    """Return the figures that a comparison reports."""
    return [figure for figure in FIGURES if has_quality(result) or not figure.of_quality]


def find_target(result: Result) -> LossTarget:
    """Return the settings' target, or a share of the way from the start to the reference's best loss."""
    settings, methods = result["settings"], result["methods"]
    if not has_quality(result):
        return LossTarget(None, "the weights are random, so only time and memory are meaningful")
    if settings["target"] is not None:
        return LossTarget(settings["target"], "given")
    name = next((name for name in (REFERENCE, *methods) if methods.get(name, {}).get("runs")), None)
    if name is None:
        return LossTarget(None, "no method has a finished run")
    curves = ([point["loss"] for point in run["curve"]] for run in methods[name]["runs"])
    finite = [losses for each in curves if (losses := [loss for loss in each if loss is not None])]
    if not finite:
        return LossTarget(None, f"{name} has no loss on development rows")
    start = sum(losses[0] for losses in finite) / len(finite)
    best = sum(map(min, finite)) / len(finite)
    if best == start:
        return LossTarget(None, f"{name} never became better than its start ({start:.4g})")
    share = settings["target_share"]
    origin = f"{share:.0%} of the way from the start ({start:.4g}) to the best of {name} ({best:.4g})"
    return LossTarget(start + share * (best - start), origin)


def figures_of(method: Mapping[str, Any], target: LossTarget, idle_bytes: int | None) -> dict[str, Spread]:
    """Return every figure of a method over its seeds, by key."""
    runs, idle = method["runs"], idle_bytes or 0
    figures: dict[str, Callable[[Run], float | None]] = {
        "test_accuracy": lambda run: _scale(run["test"].get("accuracy"), 100),
        "test_loss": lambda run: run["test"].get("loss"),
        "peak_mb": lambda run: _scale(run["peak_bytes"], 1 / MEGABYTE, idle),
        "own_peak_mb": lambda run: _scale(run["peak_bytes"], 1 / MEGABYTE, run["own_idle_bytes"] or idle),
        "activation_mb": lambda run: _scale(run["activation_bytes"], 1 / MEGABYTE),
        "tokens_per_second": lambda run: run["tokens_per_second"],
    }
    return {
        "seconds_to_target": _to_target(runs, target, "seconds"),
        "forward_passes_to_target": _to_target(runs, target, "forward_passes"),
        **{key: _spread({run["seed"]: figure(run) for run in runs}) for key, figure in figures.items()},
    }


@dataclass(frozen=True)
class Duel:
    """The best forward-only method against the best other method in one figure.

    `ratio` is forward / backward, paired by seed, for figures that are compared as ratios. `winner` is
    "forward", "backward", "tie", or None if one side lacks the figure.
    """

    figure: Figure
    forward: str | None
    backward: str | None
    ratio: Interval | None
    winner: str | None


@dataclass(frozen=True)
class Outcome:
    """The target, figures and winners of a comparison."""

    target: LossTarget
    figures: Mapping[str, Mapping[str, Spread]]
    duels: tuple[Duel, ...]


def judge(result: Result) -> Outcome:
    """Return the outcome of a stored comparison."""
    target = find_target(result)
    figures = {
        name: figures_of(method, target, result["idle_bytes"]) for name, method in result["methods"].items()
    }
    duels = []
    for figure in reported_figures(result):
        column = {name: spreads[figure.key] for name, spreads in figures.items()}
        # Methods learn differently much from a token: if losses are meaningful, time to the target counts.
        if figure.key != "tokens_per_second" or not has_quality(result):
            duels.append(_duel(result, figure, column))
    return Outcome(target, figures, tuple(duels))


def to_json(result: Result, outcome: Outcome) -> dict[str, Any]:
    """Return the figures that `--json` writes: accuracies as fractions, null for unknown values."""
    methods = {
        name: {
            **{key: method[key] for key in ("title", "family", "forward_only", "learning_rate", "failures")},
            **{
                key: _summarize_spread(spread, 0.01 if key == "test_accuracy" else 1.0)
                for key, spread in outcome.figures[name].items()
            },
        }
        for name, method in result["methods"].items()
    }
    return {
        "target": vars(outcome.target),
        "methods": methods,
        "idle_mb": _scale(result["idle_bytes"], 1 / MEGABYTE),
        "hashes": result["hashes"],
        "meta": result["meta"],
    }


def _summarize_spread(spread: Spread, scale: float) -> dict[str, Any]:
    low, high = spread.ends or (None, None)
    statistics = {"mean": spread.mean, "lowest": low, "highest": high}
    return {
        **{name: None if value is None else value * scale for name, value in statistics.items()},
        "seeds": len(spread.values),
        "censored": spread.censored,
        "bounded": len(spread.bounded),
    }


def _to_target(runs: Any, target: LossTarget, axis: str) -> Spread:
    """Return where each run first reaches the target on an axis, `seconds` or `rows`."""
    if target.value is None:
        return Spread({}, len(runs))
    crossings = {
        run["seed"]: first_crossing([(point[axis], point["loss"]) for point in run["curve"]], target.value)
        for run in runs
    }
    bounded = frozenset(seed for seed, crossing in crossings.items() if crossing and not crossing.resolved)
    spread = _spread({seed: each.position if each else None for seed, each in crossings.items()})
    return Spread(spread.values, spread.censored, bounded)


def _spread(figures: Mapping[int, float | None]) -> Spread:
    values = {seed: float(value) for seed, value in figures.items() if value is not None}
    return Spread(values, len(figures) - len(values))


def _scale(value: float | None, scale: float, offset: float = 0) -> float | None:
    return None if value is None else max(0.0, value - offset) * scale


def _noise(result: Result, figure: Figure, column: Mapping[str, Spread]) -> float:
    """Return the difference that counts as noise; for an accuracy, the standard error on the test rows."""
    means = [spread.mean / 100 for spread in column.values() if spread.mean is not None]
    if figure.key != "test_accuracy" or not means:
        return figure.noise
    rows = result["row_counts"]["test"]
    middle = min(max(max(means), 1 / rows), 1 - 1 / rows)
    return 100 * math.sqrt(middle * (1 - middle) / rows)


def _duel(result: Result, figure: Figure, column: Mapping[str, Spread]) -> Duel:
    methods, lower = result["methods"], figure.lower_is_better
    sides = {
        side: {name: spread for name, spread in column.items() if methods[name]["forward_only"] == side}
        for side in (True, False)
    }
    forward, backward = best_of(sides[True], lower), best_of(sides[False], lower)
    if forward is None or backward is None:
        both_ran = len({method["forward_only"] for method in methods.values() if method["runs"]}) == 2
        # A target that only one side reaches is won; a figure that only one side has is not.
        is_won = both_ran and figure.key.endswith("_to_target")
        only = "forward" if forward else "backward" if backward else None
        return Duel(figure, forward, backward, None, only if is_won else None)
    pair = {name: column[name] for name in (forward, backward)}
    best = best_of(pair, lower)
    assert best is not None
    other = forward if best == backward else backward
    ratio = paired_ratio(column[forward].resolved, column[backward].resolved) if figure.as_ratio else None
    winner = "forward" if best == forward else "backward"
    if is_tie(column[best], column[other], _noise(result, figure, column), figure.as_ratio):
        winner = "tie"
    return Duel(figure, forward, backward, ratio, winner)
