"""Metrics of runs for TensorBoard and Weights & Biases, read from metrics.jsonl as any reader could.

A run knows nothing of it: it never waits for a service and has none of the libraries in its memory.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from device_runner.reporting.reading import read_run
from prge.errors import ConfigError, RunError, shortened
from prge.files.curves import labels
from prge.files.run_folder import Record, is_held, read_metrics, reported
from prge.host.packages import install_extra

Log = Callable[[int, Mapping[str, float]], object]
"""Takes the step and its figures by name."""

LOOK_EVERY = 1.0
# Figures of a record; all others say when it was.
_NO_FIGURES = frozenset({"event", "split", "step"})
# Settings in words that tell nothing of the user's files.
_NAMES = ("estimator", "optimizer", "schedule", "select")


def send(
    runs: Sequence[Path], tensorboard: Path | None = None, wandb: str | None = None, follow: bool = False
) -> None:
    """Send all metrics of runs.

    Args:
        runs: their folders.
        tensorboard: folder for event files, in a folder for each run, which must be new.
        wandb: project of Weights & Biases; each run becomes one of it. The library's environment variables
            count, such as WANDB_MODE=offline.
        follow: go on as they are written, until no process holds any of the runs.

    Raises:
        ConfigError: a library isn't installed.
        RunError: a folder is no run, has no metrics or event files already; the service refuses.
    """
    _check_installed({"tensorboard": tensorboard, "wandb": wandb})
    with ExitStack() as stack:
        logs: dict[Path, list[Log]] = {run: [] for run in runs}
        for run, name in zip(runs, labels(runs), strict=True):
            read_metrics(run)
            if tensorboard is not None:
                logs[run].append(stack.enter_context(_event_files(tensorboard / name)))
            if wandb is not None:
                logs[run].append(stack.enter_context(_wandb_run(run, name, wandb)))
        sent = dict.fromkeys(runs, 0)
        going_on = True
        while going_on:
            # Asked before reading: what is written until then is read.
            going_on = follow and any(map(is_held, runs))
            for run in runs:
                records = read_metrics(run)
                for record in records[sent[run] :]:
                    for log in logs[run]:
                        log(record["step"], figures(record))
                sent[run] = len(records)
            if going_on:
                time.sleep(LOOK_EVERY)


def figures(record: Record) -> dict[str, float]:
    """The numbers of a record, by names that tell training rows from development rows."""
    part = "dev" if record.get("event") == "evaluation" else "train"
    return {
        f"{part}/{name}": float(value)
        for name, value in record.items()
        if name not in _NO_FIGURES and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _check_installed(asked: Mapping[str, object]) -> None:
    missing = [name for name, given in asked.items() if given and importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "these settings can't be used:",
            [f"--{name} is given, the package {name} is not installed" for name in missing],
            remedy=install_extra(*missing),
            code="package-missing",
        )


@contextmanager
def _event_files(folder: Path) -> Iterator[Log]:
    """Event files by TensorBoard's own writer, which needs no torch."""
    from tensorboard.summary import Writer

    if any(folder.glob("events.out.*")):
        raise RunError(
            f"{folder} has event files already",
            remedy="give another folder, or remove it",
            code="folder-not-empty",
        )
    with reported(folder):
        writer = Writer(str(folder))
    try:

        def log(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()  # at once, so that a page that is open shows it

        yield log
    finally:
        writer.close()


@contextmanager
def _wandb_run(folder: Path, name: str, project: str) -> Iterator[Log]:
    """A run of Weights & Biases; its own files lie in wandb/ of the run folder."""
    import wandb

    try:
        run: Any = wandb.init(
            project=project,
            name=name,
            dir=folder,
            config=_public(read_run(folder).config),
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )
    except wandb.Error as error:
        raise RunError(
            f"Weights & Biases takes no run: {shortened(str(error), 300)}",
            remedy="`wandb login`; or with WANDB_MODE=offline its files stay here for `wandb sync`",
            code="service-refuses",
        ) from None
    with run:
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        yield lambda step, values: run.log({"step": step, **values})


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that tell nothing of the user's files: numbers, and names of methods."""
    return {
        name: value
        for name, value in settings.items()
        if isinstance(value, int | float) or (name in _NAMES and isinstance(value, str))
    }
