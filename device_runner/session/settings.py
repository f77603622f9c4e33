"""Settings of `prge run` (flags, YAML keys, `config.yaml` of a run folder) and of `prge eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from device_runner.session.constraints import Battery, Charging, Constraint, Cool, parse_when
from prge.cli.bounds import flag
from prge.cli.field_types import CONVERSION_ERRORS, Bytes, Day, convert_value
from prge.cli.inputs import AdapterInput, InputFile, InputFolder, ModelInput, RewardInput, TestRows
from prge.cli.outputs import OutputFile
from prge.engine import EngineName
from prge.errors import ConfigError
from prge.formats.documents import DocumentError, read_yaml
from prge.formats.peft import find_adapter, find_run
from prge.formats.run_folder import CONFIG
from prge.formats.tune_folder import find_tuning
from prge.objectives.preferences import ObjectiveFlags
from prge.training.estimators.rewards import RewardFlags, reward_problems
from prge.training.estimators.table import (
    EstimatorFlags,
    estimators_with_setting,
)
from prge.training.recipe import Recipe, RunFlags
from prge.training.settings import ExampleFlags, OverflowFlags, SelectionFlags, TrainingFlags


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The engine."""

    engine: EngineName = "auto"
    """native: the stock libraries without torch, compiled against once; torch: the runtime's Python module.
    Both give the same bits. auto: native if it is built or can be built, otherwise torch."""
    threads: int | None = None
    """Number of threads; default: the number of performance cores."""
    memory: Bytes | None = None
    """Peak memory of the process, such as 400MB: resident memory, as `top` shows it in RES, with pages of
    mapped weights. Weights that don't fit are mapped on demand; a value that is too small is refused with the
    minimum. The results have the same bits. Default: all weights stay loaded, and activations of exact steps
    may take a quarter of the available memory."""


@dataclass(frozen=True, kw_only=True)
class PauseFlags:
    """Pauses."""

    pause_above_celsius: float | None = None
    """Pause while the device is hotter than this, until it is three degrees cooler."""
    pause_below_battery: float | None = None
    """Pause while the battery is below this many percent and not charging."""

    def constraints(self) -> list[Constraint]:
        """Return the constraints that must be met to continue."""
        constraints: list[Constraint] = []
        if self.pause_above_celsius is not None:
            constraints.append(Cool(flag("pause_above_celsius"), self.pause_above_celsius))
        if self.pause_below_battery is not None:
            constraints.append(Battery(flag("pause_below_battery"), self.pause_below_battery))
        return constraints


@dataclass(frozen=True, kw_only=True)
class WaitFlags(PauseFlags):
    """When to work."""

    when: str = ""
    """Pause unless all of these hold, separated by commas: charging; cool (at most 42 degrees Celsius;
    cool:40 at most 40); battery:30 (at least 30 percent, or charging); idle (a phone: the screen is off;
    otherwise: other programs use at most half a core); 22:00-07:00 (local time)."""
    only_charging: bool = False
    """Pause while the battery is not charging, as --when charging."""

    def constraints(self) -> list[Constraint]:
        """Return the constraints that must be met to continue."""
        charging = [Charging(flag("only_charging"))] if self.only_charging else []
        return [*charging, *super().constraints(), *parse_when(self.when)]


def when_problems(when: str) -> list[str]:
    """Return what is wrong with a `--when`."""
    try:
        parse_when(when)
    except ValueError as error:
        return [str(error)]
    return []


@dataclass(frozen=True)
class RunSettings(EngineFlags, RunFlags, TrainingFlags, WaitFlags):
    """Fine-tune the adapter of a bundle on the stock engine."""

    EXAMPLE: ClassVar = "--bundle bundle --train rows.jsonl --out run"
    STORED: ClassVar = CONFIG

    resume: InputFolder | None = None
    """Run folder to resume, with its own settings."""
    reward: RewardInput | None = None
    """Learn from a reward of generated text instead of answers: FILE.py:FUNCTION, a function of prompt,
    completion and row that returns a number, or a YAML file of rules. The file is your own code and runs with
    your rights. Rows need only prompts. A completion with a reward of at least 1 solves its prompt."""
    adapter: AdapterInput | None = None
    """Run, checkpoint or PEFT folder to start from instead of the bundle's own adapter."""

    keep_gradients: bool = False
    """exact: keep the gradient of every step in the journal, so that the run can be replayed. Default: keep
    those since the latest checkpoint, which is written at least every 4 steps, whatever
    --save-steps."""
    change_estimator: bool = False
    """With --resume: continue with another estimator, with the settings and learning rate that you set for
    it."""

    heads_of: InputFile | None = None
    """Encoders: journal of another run, whose heads are used if they were fitted on the same rows with the
    same bundle and folds. Default: fit new heads."""

    sample_prompts: InputFile | None = None
    """Prompts that the model answers before, during and after training, into samples.jsonl: one per line, or
    jsonl with prompt or messages."""
    sample_rows: int = 0
    """Number of development rows of a task with candidates that are answered in the same way."""
    sample_every: int = 100
    """Steps between these answers; 0: only before and after training."""

    trunk_cache_bytes: Bytes | None = None
    """Adapters in upper blocks only: bytes of the run folder that may cache the outputs of the blocks below
    them, so that each training row passes those blocks once. Default: no cache."""

    @property
    def recipe(self) -> Recipe:
        """The settings that determine the run's bits."""
        return Recipe.of(self)

    def __post_init__(self) -> None:
        problems = self.shared_problems(self.steps if self.epochs is None else None)
        if self.resume is None:
            if self.epochs is not None and self.steps != RunSettings.steps:
                problems.append(
                    f"--epochs is {self.epochs:g} and --steps is {self.steps}: set only one of them"
                )
            # A resumed run reports every setting that it wasn't started with.
            problems += self._without_meaning()
        problems += when_problems(self.when)
        problems += reward_problems(self, self.reward, self, self.task)
        if self.sample_prompts and self.sample_rows:
            problems.append("--sample-prompts and --sample-rows are both set: set only one of them")
        if self.max_example_grad_norm and self.loss_normalisation == "token":
            problems.append(
                "--max-example-grad-norm with --loss-normalisation token: an example's weight would "
                "depend on others"
            )
        if self.max_example_grad_norm and self.head_learning_rate:
            problems.append(
                "--max-example-grad-norm with --head-learning-rate: the head's gradient isn't clipped"
            )
        if problems:
            raise ConfigError(
                "These settings can't be used:",
                problems,
                remedy="See `prge run --help`.",
                code="settings-unusable",
            )

    def _without_meaning(self) -> list[str]:
        """Return problems of changed settings that belong to another estimator."""
        if self.estimator is None:
            return []
        return [
            f"{flag(each.name)} belongs to --estimator {_either(owners)}, the estimator is {self.estimator}"
            for each in fields(EstimatorFlags)
            if (owners := estimators_with_setting(each.name)) and self.estimator not in owners
            if getattr(self, each.name) != each.default
        ]


@dataclass(frozen=True)
class EvaluateSettings(EngineFlags, ObjectiveFlags, OverflowFlags, SelectionFlags, ExampleFlags):
    """Score an adapter on rows; prints the loss and the metric of the task."""

    EXAMPLE: ClassVar = "bundle --data test.jsonl --adapter run"

    bundle: ModelInput
    """Folder that `prge export` or `prge tune` wrote."""
    data: TestRows
    """Rows to score: jsonl, json, csv, tsv or parquet, several files one after another; a folder with a file
    test; or the name of a data set of the hub, of which the split test is read."""
    adapter: AdapterInput | None = None
    """Run, checkpoint or PEFT folder; default: the tuned adapter, or the bundle's own."""
    predictions: OutputFile | None = None
    """jsonl file to write: a line per row with its loss, scores and prediction."""
    json: OutputFile | None = None
    """JSON file to write the result to."""
    reward: RewardInput | None = None
    """Score the most likely completions of prompts by a reward instead, as in `prge run`: their mean reward,
    and the share of prompts that they solve."""
    max_completion_length: int = RewardFlags.max_completion_length
    """--reward: maximum number of tokens of a completion."""

    def __post_init__(self) -> None:
        problems = []
        if self.reward is not None:
            settings = RewardFlags(max_completion_length=self.max_completion_length)
            problems = reward_problems(settings, self.reward, self, self.task)
            if self.predictions is not None:
                problems.append("--predictions is for rows with answers, not for --reward")
        if problems:
            raise ConfigError("These settings can't be used:", problems, code="settings-unusable")

    def with_date(self) -> EvaluateSettings:
        """Return the settings with the scored run's date, if they have no date and the run has one."""
        trained = self.adapter or (self.bundle if find_tuning(self.bundle) else None)
        if self.date or trained is None or not trained.exists():
            return self
        return replace(self, date=date_of_run(find_run(find_adapter(trained))))


def date_of_run(run: Path | None) -> Day | None:
    """Return the date that chat templates used in the run of a folder; None if it is unknown."""
    try:
        content = read_yaml(run / CONFIG) if run is not None else None
        date = content.get("date") if isinstance(content, Mapping) else None
        return None if date is None else Day(convert_value(date, Day))
    except (OSError, DocumentError, *CONVERSION_ERRORS):
        return None


def _either(names: Sequence[str]) -> str:
    """Join names with commas and `or`."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
