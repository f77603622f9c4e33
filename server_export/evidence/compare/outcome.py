"""What a stored comparison comes to: its target, the figures of every method, who is ahead in which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from server_export.evidence.compare.analysis import (
    Interval,
    Ranking,
    Spread,
    first_crossing,
    paired_ratio,
    rank,
)
from server_export.evidence.compare.records import Point, read_curve

REFERENCE = "backprop-lora-fa"
MEGABYTE = 1e6

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """The quality to reach on development rows, and where it comes from; None where there is none."""

    quality: str
    value: float | None
    origin: str

    @property
    def lower_is_better(self) -> bool:
        """Whether quality falls."""
        return self.quality == "loss"


@dataclass(frozen=True)
class Figure:
    """A figure that methods are compared in; differences up to `noise` of it mean nothing."""

    key: str
    title: str
    unit: str = ""
    lower_is_better: bool = True
    as_ratio: bool = True
    noise: float = 0.0
    of_quality: bool = False


def _memory(key: str, title: str) -> Figure:
    return Figure(key, title, "MB", noise=0.02)


FIGURES = (
    Figure("seconds_to_target", "seconds of training to the target", "s", of_quality=True),
    Figure("rows_to_target", "rows computed to the target", "rows", of_quality=True),
    Figure("test_accuracy", "accuracy on test rows", "%", False, as_ratio=False, of_quality=True),
    Figure("test_loss", "loss on test rows", as_ratio=False, of_quality=True),
    _memory("peak_mb", "peak memory over an idle runner"),
    _memory("own_peak_mb", "peak memory over its own process idle"),
    _memory("activation_mb", "memory of steps over the loaded model"),
    Figure("tokens_per_second", "tokens of training rows a second", lower_is_better=False),
)


def has_quality(result: Result) -> bool:
    """Whether what the model learns means anything: of random weights only time and memory do."""
    return not str(result["settings"]["model"]).startswith("random:")


def compared(result: Result) -> list[Figure]:
    """The figures that a comparison is about."""
    return [figure for figure in FIGURES if has_quality(result) or not figure.of_quality]


def find_target(result: Result) -> Target:
    """The given target, or a share of the way from the start to the best of the reference."""
    settings = result["settings"]
    quality = settings["quality"]
    if not has_quality(result):
        return Target(quality, None, "the weights are random, so that only time and memory mean anything")
    if settings["target"] is not None:
        return Target(quality, settings["target"], "given")
    names = [REFERENCE, *result["methods"]]
    name = next((name for name in names if result["methods"].get(name, {}).get("runs")), None)
    if name is None:
        return Target(quality, None, "no method has a finished run")
    curves = [read_curve(run) for run in result["methods"][name]["runs"]]
    pick = min if quality == "loss" else max
    pairs = []
    for points in curves:
        values = [point.value(quality) for point in points if math.isfinite(point.value(quality))]
        if values:
            pairs.append((values[0], pick(values)))
    if not pairs:
        return Target(quality, None, f"{name} has no {quality} on development rows")
    start = sum(first for first, _ in pairs) / len(pairs)
    best = sum(last for _, last in pairs) / len(pairs)
    if best == start or (best > start) == (quality == "loss"):
        return Target(quality, None, f"{name} never became better than its start ({start:.4g})")
    share = settings["target_share"]
    origin = f"{share:.0%} of the way from the start ({start:.4g}) to the best of {name} ({best:.4g})"
    return Target(quality, start + share * (best - start), origin)


def figures_of(method: Mapping[str, Any], target: Target, idle_bytes: int | None) -> dict[str, Spread]:
    """Every figure of a method over its seeds, by key."""
    runs = method["runs"]
    idle = idle_bytes or 0
    return {
        "seconds_to_target": _to_target(runs, target, lambda point: point.seconds),
        "rows_to_target": _to_target(runs, target, lambda point: point.rows),
        "test_accuracy": _spread(runs, lambda run: _scaled(run["test"].get("accuracy"), 100)),
        "test_loss": _spread(runs, lambda run: run["test"].get("loss")),
        "peak_mb": _spread(runs, lambda run: _scaled(run["peak_bytes"], 1 / MEGABYTE, idle)),
        "own_peak_mb": _spread(
            runs, lambda run: _scaled(run["peak_bytes"], 1 / MEGABYTE, run["own_idle_bytes"] or idle)
        ),
        "activation_mb": _spread(runs, lambda run: _scaled(run["activation_bytes"], 1 / MEGABYTE)),
        "step_ms": _spread(runs, lambda run: _scaled(run["step_seconds"], 1000)),
        "tokens_per_second": _spread(runs, lambda run: run["tokens_per_second"]),
    }


@dataclass(frozen=True)
class Duel:
    """The best of the forward-only methods and the best of the others in one figure.

    `ratio` is forward / other, paired by seed, for figures that are compared so. `winner` is "forward",
    "backward", "tie", or None where one side has no figure.
    """

    figure: Figure
    forward: str | None
    backward: str | None
    ratio: Interval | None
    winner: str | None


@dataclass(frozen=True)
class Outcome:
    """All that a report says in numbers."""

    target: Target
    figures: Mapping[str, Mapping[str, Spread]]
    duels: tuple[Duel, ...]

    def column(self, key: str) -> dict[str, Spread]:
        """One figure by method."""
        return {name: figures[key] for name, figures in self.figures.items()}


def judge(result: Result) -> Outcome:
    """Judge a stored comparison."""
    target = find_target(result)
    figures = {
        name: figures_of(method, target, result["idle_bytes"]) for name, method in result["methods"].items()
    }
    duels = []
    for figure in compared(result):
        column = {name: spreads[figure.key] for name, spreads in figures.items()}
        # A token teaches methods differently much: where there is quality, time to it is what counts.
        if figure.key != "tokens_per_second" or not has_quality(result):
            duels.append(_duel(result, figure, column))
    return Outcome(target, figures, tuple(duels))


def to_json(result: Result, outcome: Outcome) -> dict[str, Any]:
    """The figures that `--json` writes: fractions for accuracies, null for what is not known."""
    methods = {
        name: {
            **{key: method[key] for key in ("title", "family", "forward_only", "learning_rate", "failures")},
            **{
                key: _numbers(spread, 0.01 if key == "test_accuracy" else 1.0)
                for key, spread in outcome.figures[name].items()
            },
        }
        for name, method in result["methods"].items()
    }
    return {
        "target": vars(outcome.target),
        "methods": methods,
        "idle_mb": None if result["idle_bytes"] is None else result["idle_bytes"] / MEGABYTE,
        "hashes": result["hashes"],
        "meta": result["meta"],
    }


def _numbers(spread: Spread, scale: float = 1.0) -> dict[str, Any]:
    marks = {"mean": spread.mean, "lowest": spread.lowest, "highest": spread.highest}
    scaled: dict[str, Any] = {name: None if mark is None else mark * scale for name, mark in marks.items()}
    return {
        **scaled,
        "seeds": len(spread.values),
        "censored": spread.censored,
        "bounded": len(spread.bounded),
    }


def _to_target(runs: Any, target: Target, position: Callable[[Point], float]) -> Spread:
    if target.value is None:
        return Spread({}, len(runs))
    crossings = {}
    for run in runs:
        points = read_curve(run)
        crossing = first_crossing(
            [position(point) for point in points],
            [point.value(target.quality) for point in points],
            target.value,
            target.lower_is_better,
        )
        if crossing is not None:
            crossings[run["seed"]] = crossing
    return Spread(
        {seed: crossing.position for seed, crossing in crossings.items()},
        len(runs) - len(crossings),
        frozenset(seed for seed, crossing in crossings.items() if not crossing.resolved),
    )


def _spread(runs: Any, figure: Callable[[Mapping[str, Any]], float | None]) -> Spread:
    figures = {run["seed"]: figure(run) for run in runs}
    values = {seed: float(value) for seed, value in figures.items() if value is not None}
    return Spread(values, len(figures) - len(values))


def _scaled(value: float | None, scale: float, offset: float = 0) -> float | None:
    return None if value is None else max(0.0, value - offset) * scale


def _noise(result: Result, figure: Figure, column: Mapping[str, Spread]) -> float:
    """Differences that mean nothing: of an accuracy, the standard error on so many test rows."""
    if figure.key != "test_accuracy":
        return figure.noise
    rows = result.get("test_rows")
    means = [spread.mean / 100 for spread in column.values() if spread.mean is not None]
    if not rows or not means:
        return 0.0
    middle = min(max(max(means), 1 / rows), 1 - 1 / rows)
    return 100 * math.sqrt(middle * (1 - middle) / rows)


def _duel(result: Result, figure: Figure, column: Mapping[str, Spread]) -> Duel:
    noise, methods = _noise(result, figure, column), result["methods"]

    def ranking(names: Iterable[str]) -> Ranking | None:
        own = {name: column[name] for name in names}
        return rank(own, figure.lower_is_better, noise, figure.as_ratio)

    sides = [
        ranking(name for name in column if methods[name]["forward_only"] == side) for side in (True, False)
    ]
    forward, backward = (None if side is None else side.best for side in sides)
    if forward is None or backward is None:
        only = "forward" if forward else "backward" if backward else None
        if len({method["forward_only"] for method in methods.values() if method["runs"]}) < 2:
            only = None
        # A target that only one side reaches is won; a figure that only one side has is not.
        return Duel(figure, forward, backward, None, only if figure.key.endswith("_to_target") else None)
    ratio = paired_ratio(column[forward].resolved, column[backward].resolved) if figure.as_ratio else None
    both = ranking((forward, backward))
    assert both is not None
    winner = "tie" if both.ties else "forward" if both.best == forward else "backward"
    return Duel(figure, forward, backward, ratio, winner)
