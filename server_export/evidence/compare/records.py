"""What a finished run's folder says, as plain numbers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prge.formats.run_folder import FINISHED, SUMMARY, read_metrics

Record = dict[str, Any]


def summary_of(run: Path) -> Record:
    """A run's run.json; empty where it has none yet."""
    path = run / SUMMARY
    record: Record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return record


def is_finished(run: Path) -> bool:
    """Whether a run took all steps that it was to take."""
    return summary_of(run).get("run", {}).get("status") in FINISHED


def curve(records: Sequence[Mapping[str, Any]]) -> list[Record]:
    """The evaluations of a metrics.jsonl: `step`, `rows`, `seconds` and `loss`, None where it isn't finite.

    Seconds are those of the training alone. Evaluations on the way are for the comparison, so their time is
    left out; and so is what a step after one takes beyond the median step, since a program may have to be
    loaded again.
    """
    taken = step_seconds(records)
    usual = statistics.median(taken.values()) if taken else 0.0
    points: dict[int, Record] = {}
    total, after_evaluation = 0.0, False
    for record in records:
        if record["event"] == "step":
            seconds = taken.get(record["step"], 0.0)
            total += min(seconds, usual) if after_evaluation else seconds
            after_evaluation = False
        elif record["event"] == "evaluation":
            after_evaluation = True
            figures = {name: record.get(name) for name in ("step", "rows", "loss")}
            points[record["step"]] = {**figures, "seconds": total}
    return list(points.values())


def best_loss(run: Path) -> float | None:
    """The lowest loss of development rows; None where none was finite."""
    losses = (point["loss"] for point in curve(read_metrics(run)))
    return min((loss for loss in losses if loss is not None), default=None)


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


def read_run(run: Path, examples: int, step_bytes: int | None, test: Mapping[str, Any] | None) -> Record:
    """A run in the form in which a comparison's result keeps it.

    Args:
        run: folder that `prge run` or `prge baseline` wrote.
        examples: training rows of a step.
        step_bytes: what steps of its method take beyond the loaded model; see `step_memory`.
        test: figures on test rows; without them the run's own.
    """
    train, records = summary_of(run)["train"], read_metrics(run)
    memory = train.get("memory") or {}
    taken = step_seconds(records)
    tokens = examples * train["training_tokens"] / train["training_rows"]
    return {
        "steps": train["steps"],
        "rows": train["rows"],
        # A row counts once, however many copies of it a step computes.
        "tokens_per_second": tokens / statistics.median(taken.values()) if taken else None,
        "peak_bytes": memory.get("peak_bytes"),
        "own_idle_bytes": memory.get("baseline_bytes"),
        "activation_bytes": step_bytes,
        "curve": curve(records),
        "test": dict(test or train.get("test") or {}),
    }


def step_memory(run: Path) -> int | None:
    """Bytes that the steps of a run without evaluations took beyond the loaded model; None if not known."""
    memory = summary_of(run).get("train", {}).get("memory") or {}
    size: int | None = memory.get("beyond_loaded_bytes")
    return size
