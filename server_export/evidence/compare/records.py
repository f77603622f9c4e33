"""What a finished run's folder says, as plain numbers."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prge.files.run_folder import SUMMARY, read_metrics

Record = dict[str, Any]

FINISHED = ("completed", "stopped early")


@dataclass(frozen=True)
class Point:
    """An evaluation on development rows; `seconds` are those of the steps before it, `rows` theirs."""

    step: int
    rows: int
    seconds: float
    loss: float
    accuracy: float | None = None

    def value(self, quality: str) -> float:
        """The loss or the accuracy; NaN where it is absent."""
        number = self.loss if quality == "loss" else self.accuracy
        return math.nan if number is None else number


def summary_of(run: Path) -> Record:
    """A run's run.json; empty where it has none yet."""
    path = run / SUMMARY
    record: Record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return record


def is_finished(run: Path) -> bool:
    """Whether a run took all steps that it was to take."""
    return summary_of(run).get("run", {}).get("status") in FINISHED


def curve(records: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The evaluations of a metrics.jsonl, with the seconds of the training alone.

    Evaluations on the way are for the comparison, so their time is left out; and so is what a step after one
    takes beyond the median step, since a program may have to be loaded again.
    """
    taken = step_seconds(records)
    usual = statistics.median(taken.values()) if taken else 0.0
    points: dict[int, Point] = {}
    total, after_evaluation = 0.0, False
    for record in records:
        if record["event"] == "step":
            seconds = taken.get(record["step"], 0.0)
            total += min(seconds, usual) if after_evaluation else seconds
            after_evaluation = False
        elif record["event"] == "evaluation":
            after_evaluation = True
            loss, accuracy = record.get("loss"), record.get("accuracy")
            points[record["step"]] = Point(
                record["step"],
                record["rows"],
                total,
                math.nan if loss is None else loss,
                accuracy,
            )
    return list(points.values())


def step_seconds(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds of each step: since the record before it."""
    seconds_by_step: dict[int, float] = {}
    before = 0.0
    for record in records:
        seconds = record.get("seconds")
        if seconds is None:
            continue
        if record["event"] == "step":
            seconds_by_step[record["step"]] = max(0.0, seconds - before)
        before = seconds
    return seconds_by_step


def read_run(
    run: Path, examples: int, activation_bytes: int | None, test: Mapping[str, Any] | None
) -> Record:
    """A run in the form in which a comparison's result keeps it.

    Args:
        run: folder that `prge run` or `prge baseline` wrote.
        examples: training rows of a step.
        activation_bytes: what steps of its method take beyond the loaded model; see `step_memory`.
        test: figures on test rows; without them the run's own.
    """
    summary, records = summary_of(run), read_metrics(run)
    train = summary["train"]
    memory = train.get("memory") or {}
    taken = step_seconds(records)
    points = curve(records)
    median = statistics.median(taken.values()) if taken else None
    tokens = examples * train["training_tokens"] / train["training_rows"]
    return {
        "steps": train["steps"],
        "rows": train["rows"],
        "seconds": train["seconds"],
        "training_seconds": points[-1].seconds if points else sum(taken.values()),
        "step_seconds": median,
        # A row counts once, however many copies of it a step computes.
        "tokens_per_second": tokens / median if median else None,
        "peak_bytes": memory.get("peak_bytes"),
        "own_idle_bytes": memory.get("baseline_bytes"),
        "activation_bytes": activation_bytes,
        "trained_values": train.get("trained_values"),
        "engine": summary.get("run", {}).get("engine"),
        # JSON has no NaN.
        "curve": [
            {**vars(point), "loss": point.loss if math.isfinite(point.loss) else None} for point in points
        ],
        "test": dict(test or train.get("test") or {}),
    }


def read_curve(run: Mapping[str, Any]) -> list[Point]:
    """The points of a stored run."""
    return [
        Point(**{**point, "loss": math.nan if point["loss"] is None else point["loss"]})
        for point in run["curve"]
    ]


def step_memory(run: Path) -> int | None:
    """Bytes that the steps of a run without evaluations took beyond the loaded model; None if not known."""
    memory = summary_of(run).get("train", {}).get("memory") or {}
    found: int | None = memory.get("beyond_loaded_bytes")
    return found
