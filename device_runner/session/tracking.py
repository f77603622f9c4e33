"""Metrics of a run for TensorBoard and Weights & Biases, sent by a process beside the run.

It follows metrics.jsonl, as any other reader could. So the run never waits for a service, has none of the
libraries in its memory, and goes on whatever becomes of them. The process ends after the run, however that
ends: it reads the run's end as the end of its standard input.

    python -m device_runner.session.tracking    one line of JSON on standard input: Job
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, get_args

from prge.errors import ConfigError
from prge.files.documents import DocumentError, parse_json
from prge.files.run_folder import METRICS, Record
from prge.host.atomic import write_file
from prge.host.packages import install_extra

Service = Literal["tensorboard", "wandb"]

LOGS = {name: f"{name}.log" for name in get_args(Service)}
_EVENTS = "tensorboard"
_WANDB_ID = "wandb.id"
# How long a run waits at its end; a service that is slower goes on alone.
PATIENCE = 10.0
_LOOK_EVERY = 1.0
# Figures of a record; all others say when it was.
_NO_FIGURES = frozenset({"event", "split", "step"})


@dataclass(frozen=True)
class Job:
    """What a tracking process needs: the service, the run folder, where to begin to read, and settings."""

    service: Service
    folder: str
    offset: int
    settings: dict[str, Any]


class Tracker(Protocol):
    """A service that takes figures."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take figures of a step by their names."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


def check_installed(services: Sequence[Service]) -> None:
    """Raise ConfigError where a service's library is missing, with how to get it."""
    missing = [name for name in services if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "these settings can't be used:",
            [f"--log-to has {name}, the package {name} is not installed" for name in missing],
            remedy=f"{install_extra(*missing)}, or leave it out: metrics.jsonl has it all",
        )


@contextlib.contextmanager
def tracked(
    folder: Path,
    services: Sequence[Service],
    settings: Mapping[str, Any],
    say: Callable[[str], None],
    patience: float = PATIENCE,
) -> Iterator[None]:
    """Send what is written to a run's metrics inside the block, to each service.

    Args:
        folder: the run folder; its metrics.jsonl is there.
        services: where to.
        settings: of the run; numbers, and the names of its methods, are sent, paths and texts are not.
        say: told what a service did not take.
        patience: seconds to wait for all of them at the end.
    """
    begun: dict[Service, subprocess.Popen[str]] = {}
    for service in dict.fromkeys(services):
        try:
            begun[service] = _begin(folder, service, settings)
        except OSError as error:
            say(f"{service} gets no metrics: {error.strerror}")
    try:
        yield
    finally:
        for process in begun.values():
            _let_go(process)
        until = time.monotonic() + patience
        for service, process in begun.items():
            try:
                code = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                say(f"{service} is still sending, in process {process.pid}; the run does not wait for it")
                continue
            if code:
                say(f"{service} did not get all metrics: {folder / LOGS[service]} says why")


def _begin(folder: Path, service: Service, settings: Mapping[str, Any]) -> subprocess.Popen[str]:
    """Start a process for a service."""
    metrics = folder / METRICS
    job = Job(service, str(folder.resolve()), metrics.stat().st_size, _public(settings))
    with (folder / LOGS[service]).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "device_runner.session.tracking"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            # Ctrl-C ends the run, and the run ends this.
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it ended at once: its code tells so
        process.stdin.write(json.dumps(asdict(job)) + "\n")
        process.stdin.flush()
    return process


def _let_go(process: subprocess.Popen[str]) -> None:
    """Tell a process that the run has ended."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that tell nothing of the user's files."""
    named = ("estimator", "optimizer", "schedule", "select")
    return {
        name: value for name, value in settings.items() if name in named or isinstance(value, int | float)
    }


class TensorBoard:
    """Implements Tracker: event files in the run folder, by TensorBoard's own writer. Needs no torch."""

    def __init__(self, job: Job) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(Path(job.folder, _EVENTS)))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See Tracker; written at once, so that a kill loses nothing."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


class WeightsAndBiases:
    """Implements Tracker: a run of Weights & Biases, the same one after a resume.

    Its own environment variables count, such as WANDB_MODE=offline and WANDB_PROJECT. A service that can't be
    reached or knows no key is done without: the files stay in the run folder for `wandb sync`.
    """

    def __init__(self, job: Job) -> None:
        import wandb

        words: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", "prge"),
            "dir": job.folder,
            "id": _wandb_id(Path(job.folder, _WANDB_ID)),
            "name": Path(job.folder).name,
            "resume": "allow",
            "config": job.settings,
            "settings": wandb.Settings(console="off", disable_git=True, save_code=False),
        }
        try:
            self._run = wandb.init(**words)
        except wandb.Error as error:
            print(f"kept for `wandb sync`: {error}", file=sys.stderr)
            self._run = wandb.init(**words, mode="offline")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See Tracker."""
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


_TRACKERS: dict[Service, Callable[[Job], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def main() -> int:
    """Follow a run's metrics until the run ends; returns 0 when its service has all of them."""
    job = Job(**json.loads(sys.stdin.readline()))
    tracker = _TRACKERS[job.service](job)
    for record in follow(Path(job.folder, METRICS), job.offset, sys.stdin):
        tracker.log(record["step"], figures(record))
    tracker.close()
    return 0


def follow(path: Path, offset: int, until: TextIO) -> Iterator[Record]:
    """Records of a file of metrics from a place on, as they are written, until `until` ends."""
    rest, ended = b"", False
    with path.open("rb") as stream:
        stream.seek(offset)
        while True:
            *lines, rest = (rest + stream.read()).split(b"\n")
            for line in lines:
                with contextlib.suppress(DocumentError):
                    record = parse_json(line)
                    if isinstance(record, dict) and type(record.get("step")) is int:
                        yield record
            if ended:
                return
            # Nothing is written to it: it is ready when it ends.
            ended = bool(select.select([until], [], [], _LOOK_EVERY)[0])


def figures(record: Record) -> dict[str, float]:
    """The numbers of a record, by names that tell training rows from development rows."""
    part = "dev" if record.get("event") == "evaluation" else "train"
    return {
        f"{part}/{name}": float(value)
        for name, value in record.items()
        if name not in _NO_FIGURES and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _wandb_id(path: Path) -> str:
    """The id that this run has there, the same after a resume."""
    if path.is_file():
        return path.read_text(encoding="utf-8").strip()
    made = uuid.uuid4().hex
    write_file(path, f"{made}\n".encode())
    return made


if __name__ == "__main__":
    raise SystemExit(main())
