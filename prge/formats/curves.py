"""Curves of runs, from the records of their metrics.jsonl: what pictures and reports draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

SCORES = ("accuracy", "f1", "exact_match", "rouge_l", "pairs_right", "perplexity")


def score_of(record: Mapping[str, Any]) -> tuple[str, float]:
    """Name and value of an evaluation's metric; the loss where it has none, or one that was not finite."""
    name = next((name for name in SCORES if record.get(name) is not None), "loss")
    return name, float(record[name])


def merit_of(record: Mapping[str, Any]) -> tuple[float, float]:
    """What evaluations of a run are compared by, more being better: their value, of equal ones the loss."""
    loss = record.get("loss")
    return float(record["value"]), -math.inf if loss is None else -float(loss)


def series(
    run: Sequence[Record], event: str, axis: str, names: Sequence[str]
) -> tuple[list[float], list[float]]:
    """Points (axis, first of `names` that is there) of an event; what was not finite is left out."""
    points = []
    for record in run:
        if record.get("event") == event and record.get(axis) is not None:
            value = next((record[name] for name in names if record.get(name) is not None), None)
            if value is not None:
                points.append((float(record[axis]), float(value)))
    return [x for x, _ in points], [y for _, y in points]


def smooth(values: Sequence[float], smoothing: float) -> list[float]:
    """Exponential moving average without the pull towards zero of its first values."""
    smoothed = []
    average = weight = 0.0
    for value in values:
        average = smoothing * average + (1 - smoothing) * value
        weight = smoothing * weight + (1 - smoothing)
        smoothed.append(average / weight)
    return smoothed


def labels(runs: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    parts = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names
