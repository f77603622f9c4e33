"""Metrics for TensorBoard and Weights & Biases, read back from files of these libraries."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from device_runner.report import main
from device_runner.reporting import trackers
from device_runner.reporting.trackers import figures, send
from prge.errors import ConfigError, RunError
from prge.formats.run_folder import RunLog, run_lock
from tests.device_runner.reporting.run_folders import write_run
from tests.refusals import raises


def losses(folder: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    """Return steps and values of a metric, as TensorBoard's own reader reads them."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    records = events.Tensors(name) if name in events.Tags()["tensors"] else []
    return [(each.step, float(make_ndarray(each.tensor_proto))) for each in records]


def write(log: RunLog, *steps: int) -> None:
    for step in steps:
        log.metric({"event": "step", "step": step, "loss": 1 / step, "projected_gradient_std": math.nan})


def test_tensorboard_reads_all_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    events = tmp_path / "events"
    assert main([*map(str, runs), "--tensorboard", str(events)]) == 0
    assert capsys.readouterr().out == f"{events}\n"
    for run in runs:
        assert losses(events / run.name) == [
            (step, pytest.approx(4 - step / 100, rel=1e-6)) for step in range(1, 41)
        ]
        assert [step for step, _ in losses(events / run.name, "dev/perplexity")] == [0, 20, 40]
    with raises(RunError, "folder-not-empty", containing=str(events)):
        send(runs, events)


def test_a_run_is_followed_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "POLL_SECONDS", 0.01)
    run, events = tmp_path / "run", tmp_path / "events"
    run.mkdir()
    with run_lock(run), RunLog(run) as log:
        write(log, 1)
        sender = threading.Thread(target=send, args=([run], events, None, True))
        sender.start()
        while not any(events.glob("run/events.out.*")) or not losses(events / "run"):
            assert sender.is_alive()
        write(log, 2, 3)
    sender.join(60)
    assert not sender.is_alive()
    assert losses(events / "run") == [(step, pytest.approx(1 / step)) for step in (1, 2, 3)]


def test_weights_and_biases_gets_metrics_and_no_paths_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = write_run(tmp_path / "run")
    send([run], wandb="project")
    (path,) = run.rglob("run-*.wandb")
    deadline = time.monotonic() + 60
    while b"dev/perplexity" not in (content := path.read_bytes()):  # wandb's service writes with a delay
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for expected in (b"train/loss", b"dev/perplexity", b"41.5", b"exact", b"learning_rate"):
        assert expected in content
    assert b"/some/bundle" not in content and b"rows.jsonl" not in content


def test_a_service_that_refuses_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_: Any) -> None:
        raise wandb.Error("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    with raises(RunError, "service-refuses", containing="no API key"):
        send([write_run(tmp_path / "run")], wandb="project")


@pytest.mark.parametrize("service", ["tensorboard", "wandb"])
def test_a_missing_library_is_named(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, "package-missing", containing=f"pip install '{service}>="):
        main([str(write_run(tmp_path / "run")), f"--{service}", str(tmp_path / "events")])


def test_follow_needs_a_destination(tmp_path: Path) -> None:
    with raises(ConfigError, "settings-unusable", containing="--follow"):
        main([str(tmp_path), "--follow"])


def test_figures_are_only_numbers() -> None:
    record = {
        "event": "evaluation",
        "step": 3,
        "split": "dev",
        "loss": 0.5,
        "forward_passes": 8,
        "seconds": None,
    }
    assert figures(record) == {"dev/loss": 0.5, "dev/forward_passes": 8.0}
