"""Settings of `prge run`: flags, keys of YAML, `config.yaml` of a run folder; and those of `prge eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from device_runner.session.conditions import Battery, Charging, Condition, Cool, parse_when
from prge.engine import EngineName
from prge.errors import ConfigError
from prge.files.documents import DocumentError, read_yaml
from prge.files.peft import find_adapter, run_of
from prge.files.run_folder import CONFIG
from prge.files.tuned import tuning_at
from prge.learning.estimators.table import (
    EstimatorFlags,
    having,
)
from prge.learning.preferences import ObjectiveFlags
from prge.running.recipe import Recipe, RunFlags
from prge.running.training_flags import ExampleFlags, OverflowFlags, SelectionFlags, TrainingFlags
from prge.verbs.bounds import flag
from prge.verbs.inputs import AdapterInput, InputFile, InputFolder, ModelInput, TestRows
from prge.verbs.kinds import MISFITS, Bytes, Day, converted
from prge.verbs.outputs import OutputFile


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The engine."""

    engine: EngineName = "auto"
    """native: the stock libraries, without torch, compiled against once; torch: the runtime's Python module.
    The same bits. auto: native where it is built or can be, else torch."""
    threads: int | None = None
    """Threads that compute; default: performance cores."""
    memory: Bytes | None = None
    """Most memory that the process takes at its peak, such as 400MB: resident, as `top` shows it in RES, with
    pages of mapped weights. Weights that don't fit are mapped when their turn comes; too little is refused
    with the least that it needs. The same bits. Default: all weights stay, and activations of exact steps in
    a quarter of the memory that is available."""


@dataclass(frozen=True, kw_only=True)
class PauseFlags:
    """Pauses."""

    pause_above_celsius: float | None = None
    """Pause while the device is hotter than this, until it is three degrees cooler."""
    pause_below_battery: float | None = None
    """Pause while the battery holds less than this many percent and is not charged."""

    def conditions(self) -> list[Condition]:
        """What must be met to go on."""
        found: list[Condition] = []
        if self.pause_above_celsius is not None:
            found.append(Cool(flag("pause_above_celsius"), self.pause_above_celsius))
        if self.pause_below_battery is not None:
            found.append(Battery(flag("pause_below_battery"), self.pause_below_battery))
        return found


@dataclass(frozen=True, kw_only=True)
class WaitFlags(PauseFlags):
    """When to work."""

    when: str = ""
    """Pause unless all of these hold, with commas between them: charging; cool (at most 42 degrees Celsius;
    cool:40 at most 40); battery:30 (at least 30 percent, or charging); idle (a phone: the screen is off;
    else: other programs take at most half a core); 22:00-07:00 (local time)."""
    only_charging: bool = False
    """Pause while the battery is not charged, as --when charging."""

    def conditions(self) -> list[Condition]:
        """What must be met to go on."""
        charging = [Charging(flag("only_charging"))] if self.only_charging else []
        return [*charging, *super().conditions(), *parse_when(self.when)]


def when_problems(when: str) -> list[str]:
    """What is wrong with a `--when`."""
    try:
        parse_when(when)
    except ValueError as error:
        return [str(error)]
    return []


@dataclass(frozen=True)
class RunSettings(EngineFlags, RunFlags, TrainingFlags, WaitFlags):
    """Fine-tune the adapter of a bundle on the stock engine."""

    STORED: ClassVar = CONFIG

    resume: InputFolder | None = None
    """Run folder to go on with, from its own settings."""
    adapter: AdapterInput | None = None
    """Run, checkpoint or PEFT folder to start from instead of the bundle's own adapter."""

    keep_gradients: bool = False
    """exact: the journal keeps the gradient of every step, so that the run can be replayed. Default: those
    since the newest checkpoint, which is written every 4 steps at least, whatever --checkpoint-every."""
    change_estimator: bool = False
    """Beside --resume: go on with another estimator, its settings and learning rate, as they are given."""

    heads_of: InputFile | None = None
    """Encoders: journal of another run, whose heads are taken if they were fitted on the same rows with the
    same bundle and folds. Default: fit them."""

    sample_prompts: InputFile | None = None
    """Prompts that the model answers before, on the way and after, into samples.jsonl: one a line, or jsonl
    with prompt or messages."""
    sample_rows: int = 0
    """So many of the development rows, of a task with candidates, are answered in the same way."""
    sample_every: int = 100
    """Steps between these answers; 0: before and after only."""

    trunk_cache_bytes: Bytes | None = None
    """Adapters in upper blocks only: bytes of the run folder that may keep what the blocks below them make of
    training rows, so that it is computed once. Default: none, every time."""

    @property
    def recipe(self) -> Recipe:
        """What determines the run's bits."""
        return Recipe.of(self)

    def __post_init__(self) -> None:
        problems = self.shared_problems(self.steps if self.epochs is None else None)
        if self.resume is None:
            if self.epochs is not None and self.steps != RunSettings.steps:
                problems.append(f"--epochs is {self.epochs:g} and --steps {self.steps}: give one of them")
            # A resumed run is told of every setting that it wasn't begun with.
            problems += self._without_meaning()
        problems += when_problems(self.when)
        if self.sample_prompts and self.sample_rows:
            problems.append("--sample-prompts and --sample-rows: give one of them")
        if self.clip_examples and self.loss_normalisation == "token":
            problems.append(
                "--clip-examples and --loss-normalisation token: an example would count by what others hold"
            )
        if self.clip_examples and self.head_learning_rate:
            problems.append("--clip-examples and --head-learning-rate: the head's gradient isn't clipped")
        if problems:
            raise ConfigError(
                "these settings can't be used:",
                problems,
                remedy="`prge run --help` explains them",
                code="settings-unusable",
            )

    def _without_meaning(self) -> list[str]:
        """Settings that were changed and belong to another estimator."""
        if self.estimator is None:
            return []
        return [
            f"{flag(each.name)} belongs to --estimator {_either(owners)}, the estimator is {self.estimator}"
            for each in fields(EstimatorFlags)
            if (owners := having(each.name)) and self.estimator not in owners
            if getattr(self, each.name) != each.default
        ]


@dataclass(frozen=True)
class EvaluateSettings(EngineFlags, ObjectiveFlags, OverflowFlags, SelectionFlags, ExampleFlags):
    """Score an adapter on rows of a file; prints the loss and the metric of the task."""

    bundle: ModelInput
    """Folder that `prge export` or `prge tune` wrote."""
    data: TestRows
    """Rows to score: jsonl, json, csv, tsv or parquet, several files one after another; a folder with a file
    test; or the name of a data set of the hub, of which the split test is read."""
    adapter: AdapterInput | None = None
    """Run, checkpoint or PEFT folder; default: the adapter that was tuned, or that the bundle came with."""
    predictions: OutputFile | None = None
    """jsonl file to write: a line per row with its loss, scores and prediction."""
    json: OutputFile | None = None
    """File to write the result to as JSON."""

    def dated(self) -> EvaluateSettings:
        """The same settings with the date of the run that is scored, where they have none and it has one."""
        trained = self.adapter or (self.bundle if tuning_at(self.bundle) else None)
        if self.date or trained is None or not trained.exists():
            return self
        return replace(self, date=date_of_run(run_of(find_adapter(trained))))


def date_of_run(run: Path | None) -> Day | None:
    """The day that chat templates took for today in the run of a folder; None where nothing tells it."""
    try:
        content = read_yaml(run / CONFIG) if run is not None else None
        found = content.get("date") if isinstance(content, Mapping) else None
        return None if found is None else Day(converted(found, Day))
    except (OSError, DocumentError, *MISFITS):
        return None


def _either(names: Sequence[str]) -> str:
    """Names in a sentence: a, b or c."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
