"""Read the figures of a finished run from its folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prge.formats.run_folder import FINISHED, SUMMARY, read_metrics

Record = dict[str, Any]


def summary_of(run: Path) -> Record:
    """Return the content of a run's run.json, or an empty record if it has none yet."""
    path = run / SUMMARY
    record: Record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return record


def is_finished(run: Path) -> bool:
    """Return whether a run is finished."""
    return summary_of(run).get("run", {}).get("status") in FINISHED


def curve(records: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return the evaluations of a metrics.jsonl: `step`, `forward_passes`, `seconds`, `loss` and `accuracy`.

    A loss that isn't finite is None, and so is an accuracy that rows don't have. Seconds count only the
    training: evaluations serve the comparison, so their time is excluded. After an evaluation, a program may
    have to be loaded again, so the next step counts at most as much as the median step.
    """
    seconds_by_step = step_seconds(records)
    median_seconds = statistics.median(seconds_by_step.values()) if seconds_by_step else 0.0
    points: dict[int, Record] = {}
    total, after_evaluation = 0.0, False
    for record in records:
        if record["event"] == "step":
            seconds = seconds_by_step.get(record["step"], 0.0)
            total += min(seconds, median_seconds) if after_evaluation else seconds
            after_evaluation = False
        elif record["event"] == "evaluation":
            after_evaluation = True
            figures = {name: record.get(name) for name in ("step", "forward_passes", "loss", "accuracy")}
            points[record["step"]] = {**figures, "seconds": total}
    return list(points.values())


def best_loss(run: Path) -> float | None:
    """Return the lowest loss on development rows, or None if none was finite."""
    losses = (point["loss"] for point in curve(read_metrics(run)))
    return min((loss for loss in losses if loss is not None), default=None)


def step_seconds(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the seconds of each step since the previous record."""
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
    """Return the record of a run for a comparison's result.

    Args:
        run: folder that `prge run` or `prge baseline` wrote.
        examples: training rows of a step.
        step_bytes: memory of the method's steps beyond the loaded model; see `step_memory`.
        test: figures on test rows; default: the run's own.
    """
    train, records = summary_of(run)["train"], read_metrics(run)
    memory = train.get("memory") or {}
    seconds_by_step = step_seconds(records)
    tokens = examples * train["training_tokens"] / train["training_rows"]
    return {
        "steps": train["steps"],
        "forward_passes": train["forward_passes"],
        # A row counts once, however many adapter copies a step computes it with.
        "tokens_per_second": tokens / statistics.median(seconds_by_step.values())
        if seconds_by_step
        else None,
        "peak_bytes": memory.get("peak_bytes"),
        "own_idle_bytes": memory.get("baseline_bytes"),
        "activation_bytes": step_bytes,
        "curve": curve(records),
        "test": dict(test or train.get("test") or {}),
    }


def step_memory(run: Path) -> int | None:
    """Return the memory of a run's steps beyond the loaded model in bytes, or None if unknown.

    The run must have no evaluations.
    """
    memory = summary_of(run).get("train", {}).get("memory") or {}
    size: int | None = memory.get("beyond_loaded_bytes")
    return size
