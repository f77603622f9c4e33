"""Reading a run folder for a report: whatever is readable, even of a killed run or of a stranger's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from device_runner.session.samples import read_samples
from prge.errors import RunError
from prge.formats.curves import SCORES, merit_of
from prge.formats.documents import DocumentError, mapping, read_json, read_yaml
from prge.formats.run_folder import (
    CONFIG,
    DECISIONS,
    JOURNAL,
    METRICS,
    SAMPLES,
    SUMMARY,
    Record,
    is_held,
    read_metrics,
)


@dataclass(frozen=True)
class TunedDecision:
    """A setting that `prge tune` chose, and why."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class RunFacts:
    """The content of a run folder; what the folder lacks is empty.

    Attributes:
        config: config.yaml, unchecked.
        run: the block of this name in run.json, unchecked, like `train` and `meta`.
        metrics: the records of metrics.jsonl.
        samples: the records of samples.jsonl.
        decisions: what `prge tune` chose.
        running: whether a process holds the folder.
        problems: a sentence for each file that could not be read.
    """

    folder: Path
    config: Mapping[str, Any]
    run: Mapping[str, Any]
    train: Mapping[str, Any]
    meta: Mapping[str, Any]
    metrics: list[Record]
    samples: list[Record]
    decisions: list[TunedDecision]
    running: bool
    problems: list[str]

    @property
    def steps(self) -> int:
        """Number of steps taken, according to the metrics."""
        return max((record["step"] for record in self.metrics), default=0)

    @property
    def evaluations(self) -> list[Record]:
        """Evaluations of development rows with a finite loss, in order."""
        return [
            record
            for record in self.metrics
            if record["event"] == "evaluation" and record.get("loss") is not None
        ]

    @property
    def before(self) -> Record | None:
        """The evaluation before the first step."""
        return next((record for record in self.evaluations if record["step"] == 0), None)

    @property
    def best(self) -> Record | None:
        """The best evaluation, by the metric that the run selects by; by the loss in older runs."""
        selectable = [record for record in self.evaluations if record.get("value") is not None]
        if selectable:
            return max(selectable, key=merit_of)
        return min(self.evaluations, key=lambda record: float(record["loss"]), default=None)

    @property
    def final_step(self) -> int | None:
        """The step of the adapter in final/; None while there is none."""
        step = self.train.get("final_step")
        return step if type(step) is int else None

    @property
    def score(self) -> str:
        """Name of the metric of development rows; `loss` if there is no other."""
        measured = {name for record in self.evaluations for name in SCORES if record.get(name) is not None}
        return next((name for name in SCORES if name in measured), "loss")

    @property
    def learns_from_reward(self) -> bool:
        """Whether the run learns from a reward; its loss is not shown, because it is the negative reward."""
        return any(record.get("reward") is not None for record in self.metrics)

    @property
    def status(self) -> str:
        """How the run ended, or `running`; `killed` if run.json doesn't record an end."""
        recorded = self.run.get("status")
        if self.running:
            return "running"
        return "killed" if recorded in (None, "running") else str(recorded)


def read_run(folder: Path) -> RunFacts:
    """Read everything that a report shows of a run.

    Raises:
        RunError: the folder is not a run, or its metrics.jsonl or samples.jsonl can't be read.
    """
    if not any((folder / name).is_file() for name in (CONFIG, JOURNAL, METRICS, SUMMARY)):
        raise RunError(
            f"{folder} is not a run: it has no {METRICS}.",
            remedy="Give the folder that you passed to `prge run --out`.",
            code="not-a-run",
        )
    metrics = read_metrics(folder) if (folder / METRICS).is_file() else []
    run = collect_run_facts(folder, metrics, read_samples(folder / SAMPLES))
    return replace(run, decisions=_decisions(folder, run.problems))


def collect_run_facts(folder: Path, metrics: list[Record], samples: list[Record]) -> RunFacts:
    """Read a run folder whose metrics and samples were read before, without the decisions of `prge tune`."""
    problems: list[str] = []
    summary = mapping(_document(folder / SUMMARY, problems))
    return RunFacts(
        folder=folder,
        config=mapping(_document(folder / CONFIG, problems)),
        run=mapping(summary.get("run")),
        train=mapping(summary.get("train")),
        meta=mapping(summary.get("meta")),
        metrics=metrics,
        samples=samples,
        decisions=[],
        running=is_held(folder),
        problems=problems,
    )


def _document(path: Path, problems: list[str]) -> Any:
    """Return the content of a JSON or YAML file; None if there is no file, or it can't be read."""
    # A link may lead to a private file of this machine, and users share reports.
    if path.is_symlink():
        problems.append(f"{path.name} was not read because it is a symbolic link")
        return None
    try:
        return read_yaml(path) if path.suffix == ".yaml" else read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, DocumentError) as error:
        problems.append(f"{path.name} can't be read: {getattr(error, 'strerror', None) or error}")
        return None


def _decisions(folder: Path, problems: list[str]) -> list[TunedDecision]:
    """Return the decisions recorded in the run folder, or else in its parent folder."""
    for location in (folder, folder.resolve().parent):
        content = _document(location / DECISIONS, problems)
        if content is None:
            continue
        listed = mapping(content).get("decisions")
        entries = listed if isinstance(listed, list) else []
        return [
            TunedDecision(*(_value_text(entry.get(name)) for name in ("name", "value", "why")))
            for entry in entries
            if isinstance(entry, Mapping)
        ]
    return []


def _value_text(value: Any) -> str:
    """Return a setting's value as text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
