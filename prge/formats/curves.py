"""Curves of runs, computed from the records of their metrics.jsonl, for charts and reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

SCORES = ("accuracy", "f1", "exact_match", "rouge_l", "pairs_right", "reward", "perplexity")


def score_of(record: Mapping[str, Any]) -> tuple[str, float]:
    """Return name and value of an evaluation's metric, or of its loss if it has no finite metric."""
    name = next((name for name in SCORES if record.get(name) is not None), "loss")
    return name, float(record[name])


def merit_of(record: Mapping[str, Any]) -> tuple[float, float]:
    """Return a sort key of an evaluation, higher is better: its value, then its negative loss."""
    loss = record.get("loss")
    return float(record["value"]), -math.inf if loss is None else -float(loss)


def series(
    run: Sequence[Record], event: str, axis: str, names: Sequence[str]
) -> tuple[list[float], list[float]]:
    """Return the points of a curve, without values that were not finite.

    Args:
        run: records of a run.
        event: the event whose records are used.
        axis: field of the x values.
        names: fields of the y values; of each record, the first one that it has is used.
    """
    points = []
    for record in run:
        if record.get("event") == event and record.get(axis) is not None:
            value = next((record[name] for name in names if record.get(name) is not None), None)
            if value is not None:
                points.append((float(record[axis]), float(value)))
    return [x for x, _ in points], [y for _, y in points]


def smooth(values: Sequence[float], smoothing: float) -> list[float]:
    """Return the exponential moving average of values, with bias correction."""
    smoothed = []
    average = weight = 0.0
    for value in values:
        average = smoothing * average + (1 - smoothing) * value
        weight = smoothing * weight + (1 - smoothing)
        smoothed.append(average / weight)
    return smoothed


def labels(runs: Sequence[Path]) -> list[str]:
    """Return a name for each run: the shortest ends of the paths that are unique."""
    parts = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names
