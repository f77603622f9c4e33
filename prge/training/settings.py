"""Settings that verbs share: rows, their selection and truncation, optimizer and loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import date
from typing import Literal, TypeVar

from prge.cli.bounds import bound_problems
from prge.cli.field_types import Day
from prge.cli.inputs import BundleInput, DevRows, NamedOrFile, TrainRows
from prge.cli.outputs import OutputFolder
from prge.cli.settings import with_absolute_paths
from prge.data.options import Overflow
from prge.data.readers.files import Selection
from prge.data.sources import hub_names
from prge.data.tokenization.control_tokens import ControlTokens
from prge.training.loop import TrainingSettings
from prge.training.optimizers import OptimizerName, ScheduleName, default_warmup_steps

Flags = TypeVar("Flags", bound="TrainingFlags")
Rows = TypeVar("Rows", bound="RowsFlags")
# Settings that name rows; their values may be names of hub data sets instead of paths.
_ROWS = ("train", "dev", "test")


@dataclass(frozen=True, kw_only=True)
class RowsFlags:
    """The form of the rows."""

    task: NamedOrFile | None = None
    """Name of a task, or a YAML file. Without a task, the columns determine what a row is: a text, a prompt
    with a completion, messages, Alpaca's or ShareGPT's format, a pair of answers, or a rated answer."""
    columns: list[str] = field(default_factory=list)
    """Renames columns of the rows, such as prompt=question completion=answer."""
    control_tokens: ControlTokens = "special"
    """Where control tokens that are written out in rows, such as <|im_end|>, are read as control tokens and
    not as plain characters. special: in texts, prompts and completions, not in messages; prompt: only in
    prompts; all: also in messages; text: nowhere. Their number is reported."""
    date: Day | None = None
    """Date that chat templates get as today's; default: the date of the run that is resumed or evaluated,
    else today."""

    def with_date(self: Rows) -> Rows:
        """Return the settings with today's date if they have no date."""
        return self if self.date else replace(self, date=Day(date.today().isoformat()))


@dataclass(frozen=True, kw_only=True)
class ExampleFlags(RowsFlags):
    """The form of the rows, and how they become examples."""

    append_eos: bool = True
    """Append the model's end-of-sequence token to texts and completions that don't end with it."""


@dataclass(frozen=True, kw_only=True)
class SelectionFlags:
    """The selection of rows of a file."""

    start: int = 0
    """Number of rows to skip at the beginning of the file, after shuffling."""
    limit: int | None = None
    """Maximum number of rows to read."""
    shuffle_seed: int | None = None
    """Shuffle the rows with this seed before start and limit; the same order on every machine."""

    @property
    def selection(self) -> Selection:
        """The selection of rows to read."""
        return Selection(self.start, self.limit, self.shuffle_seed)


@dataclass(frozen=True, kw_only=True)
class OverflowFlags:
    """The handling of long rows."""

    overflow: Overflow = "auto"
    """What to do with rows that are too long for the bundle: error, truncate or split; auto: split texts and
    chats, truncate others. Truncation is reported."""


@dataclass(frozen=True, kw_only=True)
class LearningRateFlags:
    """The learning rate."""

    learning_rate: float = 3e-3
    """Peak learning rate."""
    lr_scheduler_type: ScheduleName = "cosine"
    """Schedule of the learning rate after the warm-up."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; default: a tenth of all steps, at least 8 and at most a third."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """The optimizer."""

    optimizer: OptimizerName | None = None
    """sgd, momentum or adam. Default: adam."""
    momentum: float = 0.9
    """Coefficient of momentum, and beta1 of adam."""
    adam_beta2: float | None = None
    """beta2 of adam; default: 0.98 with exact gradients, else 0.999."""
    weight_decay: float = 0.0
    """Decoupled weight decay, as in AdamW, of all trained matrices: before each update, the values are
    multiplied by 1 - learning rate * weight decay."""
    loraplus_lr_ratio: float = 1.0
    """Bundles of `--adapter lora`: ratio of lora_b's learning rate to lora_a's, such as 16 (LoRA+)."""


@dataclass(frozen=True, kw_only=True)
class TrainingLoopFlags(OverflowFlags, LearningRateFlags):
    """Settings that determine the steps of a training, whatever the form of the rows."""

    seed: int = 42
    """Seed of the order of rows and of random directions."""
    steps: int = 1000
    """Number of optimizer steps."""

    train_start: int = 0
    """Training rows to skip at the beginning of the file, after shuffling."""
    train_limit: int | None = None
    """Maximum number of training rows."""
    dev_start: int = 0
    """Development rows to skip, after shuffling."""
    dev_limit: int | None = None
    """Maximum number of development rows."""
    shuffle_seed: int | None = None
    """Shuffle training and development rows with this seed before start and limit; the same order on every
    machine."""
    max_dropped: float = 0.05
    """Largest share of target tokens that may be lost because rows are too long."""

    eval_steps: int = 100
    """Steps between evaluations on development rows; 0: only after the last step."""
    eval_at: list[int] = field(default_factory=list)
    """Further steps to evaluate after, such as 1 2 4 8 16; 0: before the first step."""
    select: Literal["metric", "loss"] = "metric"
    """What the best step is selected by: the task's metric (perplexity without a task), or the loss."""
    patience: int = 0
    """Stop after this many evaluations without an improvement; 0: never."""
    divergence_ratio: float = 3.0
    """Stop when the smoothed loss exceeds this multiple of the first loss (or of 1, if that is larger); not
    with --objective es and grpo, whose losses may rise."""

    head_folds: int = 10
    """Encoders: score each training row with a head that was fitted without the row's fold; 0: with the final
    head."""

    @property
    def resolved_warmup_steps(self) -> int:
        """Number of warm-up steps."""
        return default_warmup_steps(self.steps) if self.warmup_steps is None else self.warmup_steps

    @property
    def steps_per_batch(self) -> int:
        """Number of consecutive steps with the same examples."""
        return 1

    def loop_settings(self, *, save_steps: int, until: int | None = None) -> TrainingSettings:
        """Return the settings of the training loop, which stops after `until` steps if that is given."""
        return TrainingSettings(
            steps=self.steps if until is None else until,
            seed=self.seed,
            eval_steps=self.eval_steps,
            eval_at=self.eval_at,
            save_steps=save_steps,
            patience=self.patience,
            divergence_ratio=self.divergence_ratio,
        )


@dataclass(frozen=True)
class TrainingFlags(TrainingLoopFlags, ExampleFlags):
    """A training: bundle, rows, and run folder."""

    bundle: BundleInput
    """Bundle folder that `prge export` wrote."""
    train: TrainRows
    """Training rows: one or several jsonl, json, csv, tsv or parquet files; a folder with files train, valid
    and test; or the name of a data set on the Hugging Face hub."""
    out: OutputFolder
    """Run folder to create."""
    dev: DevRows | None = None
    """Development rows, evaluated during training; the best step becomes the result. A folder's file valid is
    read, or a data set's split validation."""

    save_steps: int = 100
    """Steps between checkpoints; 0: none."""
    quiet: bool = False
    """Don't print progress."""

    def resolved(self: Flags) -> Flags:
        """Return the settings with absolute paths, to resume from any working directory."""
        return with_absolute_paths(self, keep=hub_names(self, _ROWS), path_texts=("model",))

    def shared_problems(self, steps: int | None) -> list[str]:
        """Return the problems of these settings; `steps` is the number of steps, if it is known."""
        problems = bound_problems(self)
        if steps is not None:
            problems += [
                f"--eval-at has {step}, there are only {steps} --steps"
                for step in self.eval_at
                if step > steps
            ]
        if self.head_folds == 1:
            problems.append(f"--head-folds is {self.head_folds}, must be 0 or at least 2")
        if steps is not None and self.warmup_steps is not None and self.warmup_steps > steps:
            problems.append(f"--warmup-steps is {self.warmup_steps}, --steps only {steps}")
        if self.patience and not self.dev:
            problems.append("--patience needs --dev rows to judge by")
        return problems
