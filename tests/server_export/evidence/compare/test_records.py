"""Figures from run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server_export.evidence.compare.records import (
    best_loss,
    curve,
    is_finished,
    read_run,
    step_memory,
    step_seconds,
)
from tests.comparisons import write_run


def records(*entries: tuple[str, int, float, float | None]) -> list[dict[str, Any]]:
    """Return records of (event, step, seconds, loss)."""
    return [
        {"event": event, "step": step, "seconds": seconds, "loss": loss, "forward_passes": 10 * step}
        for event, step, seconds, loss in entries
    ]


def test_seconds_leave_evaluations_and_reloading_out() -> None:
    result = curve(
        records(
            ("evaluation", 0, 5.0, 1.0),
            ("step", 1, 6.0, 0.9),
            ("step", 2, 7.0, 0.8),
            ("evaluation", 2, 17.0, 0.8),
            ("step", 3, 20.0, 0.7),
            ("step", 4, 21.0, 0.6),
            ("evaluation", 4, 30.0, 0.6),
        )
    )
    columns = ("step", "forward_passes", "seconds", "loss")
    assert [tuple(point[name] for name in columns) for point in result] == [
        (0, 0, 0.0, 1.0),
        (2, 20, 2.0, 0.8),
        (4, 40, 4.0, 0.6),
    ]


def test_step_seconds_are_since_the_record_before() -> None:
    result = step_seconds(
        records(("evaluation", 0, 5.0, 1.0), ("step", 1, 6.5, None), ("step", 2, 7.0, None))
    )
    assert result == pytest.approx({1: 1.5, 2: 0.5})


def test_losses_that_are_not_finite_are_none(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2, "completed")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last = {**json.loads(lines[-1]), "loss": None}
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    assert [point["loss"] for point in read_run(run, 4, None, None)["curve"]] == [0.7, None]
    assert best_loss(run) == 0.7


def test_a_run_of_each_family(tmp_path: Path) -> None:
    engine = read_run(write_run(tmp_path / "a", 3, "completed"), 4, 123, {"loss": 0.5, "accuracy": 0.7})
    assert (engine["activation_bytes"], engine["test"]["accuracy"]) == (123, 0.7)
    # Four rows of 20 tokens in a tenth of a second, whatever the number of copies.
    assert engine["tokens_per_second"] == pytest.approx(800)
    pytorch = read_run(write_run(tmp_path / "b", 3, "completed", baseline=True), 4, None, None)
    assert (pytorch["activation_bytes"], pytorch["test"]["accuracy"]) == (None, 0.875)
    assert pytorch["own_idle_bytes"] == 60_000_000


@pytest.mark.parametrize(
    ("status", "finished"), [("completed", True), ("stopped early", True), ("running", False)]
)
def test_finished_runs(status: str, finished: bool, tmp_path: Path) -> None:
    assert is_finished(write_run(tmp_path / "run", 2, status)) is finished
    assert not is_finished(tmp_path / "nowhere")


def test_memory_of_steps_may_be_unknown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2, "completed")
    assert step_memory(run) == 7_000_000
    summary = json.loads((run / "run.json").read_text())
    del summary["train"]["memory"]["beyond_loaded_bytes"]
    (run / "run.json").write_text(json.dumps(summary))
    assert step_memory(run) is step_memory(tmp_path / "nowhere") is None
