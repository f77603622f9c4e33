"""A run folder as a report reads it: whatever is there, of a run that may be killed or a stranger's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from device_runner.session.samples import read_samples
from prge.errors import RunError
from prge.files.curves import SCORES, merit_of
from prge.files.documents import DocumentError, mapping, read_json, read_yaml
from prge.files.run_folder import (
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
class Decision:
    """What was chosen for the user, and why."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class RunFacts:
    """What a run folder tells; empty is what it doesn't.

    `config` is config.yaml; `run`, `train` and `meta` are the blocks of run.json. Nothing in them is checked.
    `problems` says what could not be read.
    """

    folder: Path
    config: Mapping[str, Any]
    run: Mapping[str, Any]
    train: Mapping[str, Any]
    meta: Mapping[str, Any]
    metrics: list[Record]
    samples: list[Record]
    decisions: list[Decision]
    running: bool
    problems: list[str]

    @property
    def steps(self) -> int:
        """Steps taken, as far as the metrics tell."""
        return max((record["step"] for record in self.metrics), default=0)

    @property
    def evaluations(self) -> list[Record]:
        """Evaluations of development rows whose loss is finite, in order."""
        return [
            each for each in self.metrics if each["event"] == "evaluation" and each.get("loss") is not None
        ]

    @property
    def before(self) -> Record | None:
        """The evaluation before the first step."""
        return next((each for each in self.evaluations if each["step"] == 0), None)

    @property
    def best(self) -> Record | None:
        """The evaluation that the run took for its best; of an older run that of the least loss."""
        judged = [each for each in self.evaluations if each.get("value") is not None]
        if judged:
            return max(judged, key=merit_of)
        return min(self.evaluations, key=lambda each: float(each["loss"]), default=None)

    @property
    def final_step(self) -> int | None:
        """The step whose adapter is in final/; None while there is none."""
        step = self.train.get("final_step")
        return step if type(step) is int else None

    @property
    def score(self) -> str:
        """Name of the metric of development rows, else `loss`."""
        measured = {name for each in self.evaluations for name in SCORES if each.get(name) is not None}
        return next((name for name in SCORES if name in measured), "loss")

    @property
    def status(self) -> str:
        """How the run ended, or that it goes on; `killed` if it had no time to say."""
        told = self.run.get("status")
        if self.running:
            return "running"
        return "killed" if told in (None, "running") else str(told)


def read_run(folder: Path) -> RunFacts:
    """Everything that a report tells of a run.

    Raises:
        RunError: the folder is no run, or its metrics.jsonl or samples.jsonl can't be read.
    """
    if not any((folder / name).is_file() for name in (CONFIG, JOURNAL, METRICS, SUMMARY)):
        raise RunError(
            f"{folder} is no run: it has no {METRICS}",
            remedy="give the folder of `prge run --out`",
            code="not-a-run",
        )
    metrics = read_metrics(folder) if (folder / METRICS).is_file() else []
    run = facts_of(folder, metrics, read_samples(folder / SAMPLES))
    return replace(run, decisions=_decisions(folder, run.problems))


def facts_of(folder: Path, metrics: list[Record], samples: list[Record]) -> RunFacts:
    """What a run's folder tells, with records that were read before; nothing beside the folder is read."""
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
    """The value of a JSON or YAML file; None if it isn't there or can't be read."""
    if path.is_symlink():  # to a file of this machine, perhaps, and pages are given away
        problems.append(f"{path.name} is a link: it isn't read")
        return None
    try:
        return read_yaml(path) if path.suffix == ".yaml" else read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, DocumentError) as error:
        problems.append(f"{path.name} can't be read: {getattr(error, 'strerror', None) or error}")
        return None


def _decisions(folder: Path, problems: list[str]) -> list[Decision]:
    """Those of the run folder, else of the folder that it lies in."""
    for place in (folder, folder.resolve().parent):
        content = _document(place / DECISIONS, problems)
        if content is None:
            continue
        listed = mapping(content).get("decisions")
        entries = listed if isinstance(listed, list) else []
        return [
            Decision(*(_words(entry.get(name)) for name in ("name", "value", "why")))
            for entry in entries
            if isinstance(entry, Mapping)
        ]
    return []


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
