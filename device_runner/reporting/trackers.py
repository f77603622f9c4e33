"""Sending metrics of runs to TensorBoard and Weights & Biases, from metrics.jsonl.

A separate process sends them: a run never waits for a service, and doesn't load these libraries.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from device_runner.reporting.run_reader import read_run
from prge.errors import ConfigError, RunError, shortened
from prge.formats.curves import labels
from prge.formats.run_folder import Record, as_run_error, is_held, read_metrics
from prge.system.packages import install_extra_command

Log = Callable[[int, Mapping[str, float]], object]
"""Logs the values of a step by name."""

POLL_SECONDS = 1.0
# Fields of a record that are no measured values.
_NO_FIGURES = frozenset({"event", "split", "step"})
# Text settings that reveal nothing about the user's files.
_NAMES = ("estimator", "optimizer", "lr_scheduler_type", "select")


def send(
    runs: Sequence[Path], tensorboard: Path | None = None, wandb: str | None = None, follow: bool = False
) -> None:
    """Send all metrics of some runs to trackers.

    Args:
        runs: folders of the runs.
        tensorboard: folder for event files; each run gets a new folder in it.
        wandb: project of Weights & Biases; each run becomes a run of the project. The library's environment
            variables apply, such as WANDB_MODE=offline.
        follow: keep sending new metrics until no process holds any of the runs.

    Raises:
        ConfigError: a library isn't installed.
        RunError: a folder is not a run, lacks metrics, or has event files already; or the service refuses.
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
        is_running = True
        while is_running:
            # Checked before reading, so that the last records of a run that ends meanwhile are read.
            is_running = follow and any(map(is_held, runs))
            for run in runs:
                records = read_metrics(run)
                for record in records[sent[run] :]:
                    for log in logs[run]:
                        log(record["step"], figures(record))
                sent[run] = len(records)
            if is_running:
                time.sleep(POLL_SECONDS)


def figures(record: Record) -> dict[str, float]:
    """Return the numbers of a record, with the prefix `train/` or `dev/` in their names."""
    part = "dev" if record.get("event") == "evaluation" else "train"
    return {
        f"{part}/{name}": float(value)
        for name, value in record.items()
        if name not in _NO_FIGURES and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _check_installed(settings: Mapping[str, object]) -> None:
    """Raise ConfigError if a setting is given whose package is not installed."""
    missing = [name for name, value in settings.items() if value and importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "These settings can't be used:",
            [f"--{name} needs the package {name}, which is not installed" for name in missing],
            remedy=install_extra_command(*missing),
            code="package-missing",
        )


@contextmanager
def _event_files(folder: Path) -> Iterator[Log]:
    """Write event files with TensorBoard's own writer, which needs no torch."""
    from tensorboard.summary import Writer

    if any(folder.glob("events.out.*")):
        raise RunError(
            f"{folder} already has event files.",
            remedy="Give another folder, or remove this one.",
            code="folder-not-empty",
        )
    with as_run_error(folder):
        writer = Writer(str(folder))
    try:

        def log(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()  # so that an open page shows the values at once

        yield log
    finally:
        writer.close()


@contextmanager
def _wandb_run(folder: Path, name: str, project: str) -> Iterator[Log]:
    """Log to a run of Weights & Biases, which keeps its own files in wandb/ of the run folder."""
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
            f"Weights & Biases refuses the run: {shortened(str(error), 300)}",
            remedy="Run `wandb login`; or set WANDB_MODE=offline, and upload later with `wandb sync`.",
            code="service-refuses",
        ) from None
    with run:
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        yield lambda step, values: run.log({"step": step, **values})


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that reveal nothing about the user's files: numbers, and names of methods."""
    return {
        name: value
        for name, value in settings.items()
        if isinstance(value, int | float) or (name in _NAMES and isinstance(value, str))
    }
