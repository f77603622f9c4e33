"""Metrics on their way to TensorBoard and Weights & Biases: all of them arrive, and no run waits or fails.

Stand-ins of the two libraries take the calls that the real ones document; where these are installed, files of
their own are read back.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from device_runner.session.tracking import Service, check_installed, figures, tracked
from prge.errors import ConfigError
from prge.files.run_folder import RunLog

TENSORBOARD = """
import json, os, pathlib

class Writer:
    def __init__(self, logdir):
        self.path = pathlib.Path(logdir, "events.jsonl")
        self.path.parent.mkdir(exist_ok=True)
    def add_scalar(self, tag, data, step, *, wall_time=None, description=None):
        if os.environ.get("BROKEN"):
            raise OSError("the disk is full")
        with self.path.open("a") as stream:
            stream.write(json.dumps([tag, data, step]) + "\\n")
    def flush(self): pass
    def close(self): pass
"""
WANDB = """
import json, os, pathlib, time

class Error(Exception): pass
class Settings(dict): pass

class Run:
    def __init__(self, words):
        self.path = pathlib.Path(words["dir"], "wandb.jsonl")
        self.log({key: value for key, value in words.items() if key != "dir"})
    def define_metric(self, name, step_metric=None): pass
    def log(self, content):
        with self.path.open("a") as stream:
            stream.write(json.dumps(content) + "\\n")
    def finish(self):
        time.sleep(float(os.environ.get("SLOW", 0)))
        self.log("finished")

def init(mode=None, **words):
    if os.environ.get("AWAY") and mode != "offline":
        raise Error("no network")
    return Run({**words, "mode": mode})
"""


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with stand-ins of both libraries, which processes of this one find too."""
    folder = tmp_path / "libraries"
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "__init__.py").touch()
    (folder / "tensorboard" / "summary.py").write_text(TENSORBOARD)
    (folder / "wandb.py").write_text(WANDB)
    repository = Path(__file__).resolve().parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{repository}")
    return folder


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    return RunLog(tmp_path / "run")


def lines(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def eventually(arrived: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not arrived():
        assert time.monotonic() < until
        time.sleep(0.05)


def write(log: RunLog, steps: range) -> None:
    for step in steps:
        log.metric({"event": "step", "step": step, "loss": 1 / step, "scalar_deviation": float("nan")})


def test_every_figure_arrives_and_what_was_there_before_does_not_come_again(
    libraries: Path, log: RunLog, tmp_path: Path
) -> None:
    said: list[str] = []
    with tracked(log.folder, ["tensorboard"], {}, said.append):
        write(log, range(1, 3))
        log.metric({"event": "evaluation", "step": 2, "split": "dev", "loss": 0.4, "accuracy": 0.75})
    with tracked(log.folder, ["tensorboard"], {}, said.append):
        write(log, range(3, 4))
    assert lines(log.folder / "tensorboard" / "events.jsonl") == [
        ["train/loss", 1.0, 1],
        ["train/loss", 0.5, 2],
        ["dev/loss", 0.4, 2],
        ["dev/accuracy", 0.75, 2],
        ["train/loss", 1 / 3, 3],
    ]
    assert said == []


def test_figures_arrive_while_the_run_goes_on(libraries: Path, log: RunLog) -> None:
    events = log.folder / "tensorboard" / "events.jsonl"
    with tracked(log.folder, ["tensorboard"], {}, print):
        write(log, range(1, 2))
        eventually(events.exists)


def test_weights_and_biases_gets_one_run_and_nothing_of_the_users_files(libraries: Path, log: RunLog) -> None:
    settings = {"train": Path("/secret/rows.jsonl"), "task": "secret", "steps": 9, "estimator": "exact"}
    for steps in (range(1, 2), range(2, 3)):
        with tracked(log.folder, ["wandb"], settings, print):
            write(log, steps)
    first, step, end, second, *_ = lines(log.folder / "wandb.jsonl")
    assert isinstance(first, dict) and isinstance(second, dict)
    assert first["config"] == {"steps": 9, "estimator": "exact"}
    assert (first["id"], first["resume"], first["mode"]) == (second["id"], "allow", None)
    assert (step, end) == ({"step": 1, "train/loss": 1.0}, "finished")


def test_a_service_that_is_away_gets_files_for_later(
    libraries: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWAY", "1")
    said: list[str] = []
    with tracked(log.folder, ["wandb"], {}, said.append):
        write(log, range(1, 2))
    first, *rest = lines(log.folder / "wandb.jsonl")
    assert isinstance(first, dict) and first["mode"] == "offline"
    assert rest[-1] == "finished" and said == []
    assert "no network" in (log.folder / "wandb.log").read_text()


def test_a_slow_service_is_not_waited_for(
    libraries: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW", "60")
    said: list[str] = []
    begin = time.monotonic()
    with tracked(log.folder, ["wandb"], {}, said.append, patience=0.5):
        write(log, range(1, 2))
    assert time.monotonic() - begin < 20
    (told,) = said
    assert "wandb is still sending, in process " in told
    os.kill(int(told.partition("process ")[2].partition(";")[0]), signal.SIGKILL)


def test_what_a_library_refuses_is_told_and_ends_no_run(
    libraries: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", "1")
    said: list[str] = []
    with tracked(log.folder, ["tensorboard"], {}, said.append):
        write(log, range(1, 3))
    assert said == [f"tensorboard did not get all metrics: {log.folder / 'tensorboard.log'} says why"]
    assert "the disk is full" in (log.folder / "tensorboard.log").read_text()


@pytest.mark.parametrize("service", ["tensorboard", "wandb"])
def test_a_missing_library_is_named_before_anything_begins(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install '{service}>="):
        check_installed([service])


def test_figures_are_numbers_alone() -> None:
    record = {"event": "evaluation", "step": 3, "split": "dev", "loss": 0.5, "rows": 8, "seconds": None}
    assert figures(record) == {"dev/loss": 0.5, "dev/rows": 8.0}


def test_the_files_are_tensorboards_own(log: RunLog) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulators
    from tensorboard.util import tensor_util as tensors

    for steps in (range(1, 3), range(3, 4)):
        with tracked(log.folder, ["tensorboard"], {}, print, patience=60):
            write(log, steps)
    events = accumulators.EventAccumulator(str(log.folder / "tensorboard"))
    events.Reload()
    found = [(each.step, tensors.make_ndarray(each.tensor_proto)) for each in events.Tensors("train/loss")]
    assert found == [(step, pytest.approx(1 / step)) for step in (1, 2, 3)]


def test_weights_and_biases_own_files_are_those_of_one_run(
    log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    settings = {"train": Path("/secret/rows.jsonl"), "estimator": "exact"}
    for steps in (range(1, 2), range(2, 3)):
        with tracked(log.folder, ["wandb"], settings, said.append, patience=120):
            write(log, steps)
    files = sorted(log.folder.rglob("run-*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1
    for path, loss in zip(files, (b"1.0", b"0.5"), strict=True):
        content = path.read_bytes()
        assert b"train/loss" in content and loss in content and b"exact" in content
        assert b"/secret" not in content
    assert said == []
