"""Settings that verbs share: what rows are, which of them, how they are fitted, how a training goes."""

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
# Settings that name rows, which need be no path.
_ROWS = ("train", "dev", "test")


@dataclass(frozen=True, kw_only=True)
class RowsFlags:
    """What rows are."""

    task: NamedOrFile | None = None
    """Task name or YAML file; without one, the columns say what a row is: text, prompt and completion,
    messages, Alpaca's or ShareGPT's, a pair of answers or a rated one."""
    columns: list[str] = field(default_factory=list)
    """Names for columns of the rows: prompt=question completion=answer."""
    control_tokens: ControlTokens = "special"
    """Where control tokens that are written in rows, such as <|im_end|>, are control tokens and not the
    characters that they are: special, in texts, prompts and completions, not in messages; prompt, in prompts
    alone; all, in messages too; text, nowhere. How many there are is reported."""
    date: Day | None = None
    """Day that a chat template takes for today; default: that of the run that is gone on with or scored, else
    today."""

    def with_date(self: Rows) -> Rows:
        """The same settings with today's date where they have none."""
        return self if self.date else replace(self, date=Day(date.today().isoformat()))


@dataclass(frozen=True, kw_only=True)
class ExampleFlags(RowsFlags):
    """What rows are, and what is learnt of them."""

    append_eos: bool = True
    """End texts and completions with the model's end-of-sequence token, unless they end with it."""


@dataclass(frozen=True, kw_only=True)
class SelectionFlags:
    """Which rows of a file."""

    start: int = 0
    """Rows to leave out at the file's beginning, after shuffling."""
    limit: int | None = None
    """Most rows."""
    shuffle_seed: int | None = None
    """Shuffle the file before start and limit; the same rows on every machine."""

    @property
    def selection(self) -> Selection:
        """The rows to read."""
        return Selection(self.start, self.limit, self.shuffle_seed)


@dataclass(frozen=True, kw_only=True)
class OverflowFlags:
    """How rows are fitted."""

    overflow: Overflow = "auto"
    """What to do with a row that is too long for the bundle: error, truncate or split it; auto: split texts
    and chats, truncate all else. What is cut is reported."""


@dataclass(frozen=True, kw_only=True)
class LearningRateFlags:
    """The learning rate."""

    learning_rate: float = 3e-3
    """Peak learning rate."""
    schedule: ScheduleName = "cosine"
    """Learning rate over the steps after warm-up."""
    warmup: int | None = None
    """Steps of linear warm-up; default: a tenth of all, at least 8, at most a third."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """The optimizer."""

    optimizer: OptimizerName | None = None
    """sgd, momentum or adam. Default: adam."""
    momentum: float = 0.9
    """momentum's coefficient, and adam's beta1."""
    beta2: float | None = None
    """adam's second coefficient; default: 0.98 with exact gradients, else 0.999."""
    weight_decay: float = 0.0
    """Decoupled weight decay, as AdamW's: before each update the values shrink by this times the learning
    rate. All trained matrices decay: lora_b, and lora_a where it is trained."""
    lora_plus: float = 1.0
    """Bundles of `--adapter lora`: learning rate of lora_b in units of that of lora_a, such as 16 (LoRA+)."""


@dataclass(frozen=True, kw_only=True)
class TrainingLoopFlags(OverflowFlags, LearningRateFlags):
    """How a training goes: what determines its steps, whatever the rows are."""

    seed: int = 42
    """Seed of row order and of random directions."""
    steps: int = 1000
    """Optimizer steps."""

    train_start: int = 0
    """Training rows to leave out at the file's beginning, after shuffling."""
    train_limit: int | None = None
    """Most training rows."""
    dev_start: int = 0
    """Development rows to leave out, after shuffling."""
    dev_limit: int | None = None
    """Most development rows."""
    shuffle_seed: int | None = None
    """Shuffle the training and development files before start and limit; the same rows on every machine."""
    max_dropped: float = 0.05
    """Largest share of target tokens that may be left out because rows are too long."""

    evaluate_every: int = 100
    """Steps between evaluations on development rows; 0: only at the end."""
    evaluate_at: list[int] = field(default_factory=list)
    """Further steps to evaluate after, such as 1 2 4 8 16; 0 is the start."""
    select: Literal["metric", "loss"] = "metric"
    """What makes a step the best: the task's metric (perplexity without a task), or the loss."""
    patience: int = 0
    """Stop after this many evaluations without a higher value; 0: never."""
    divergence_ratio: float = 3.0
    """Stop when the smoothed loss exceeds this multiple of the first one (and of 1)."""

    head_folds: int = 10
    """Encoders: score each training row by a head fitted without its fold; 0: by the head itself."""

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up."""
        return default_warmup_steps(self.steps) if self.warmup is None else self.warmup

    def loop_settings(self, *, checkpoint_every: int, until: int | None = None) -> TrainingSettings:
        """The settings of the loop, which ends after `until` steps if that is given."""
        return TrainingSettings(
            steps=self.steps if until is None else until,
            seed=self.seed,
            evaluate_every=self.evaluate_every,
            evaluate_at=self.evaluate_at,
            checkpoint_every=checkpoint_every,
            patience=self.patience,
            divergence_ratio=self.divergence_ratio,
        )


@dataclass(frozen=True)
class TrainingFlags(TrainingLoopFlags, ExampleFlags):
    """What is trained, and on what."""

    bundle: BundleInput
    """Folder that `prge export` wrote."""
    train: TrainRows
    """Training rows: jsonl, json, csv, tsv or parquet, several files one after another; a folder with files
    train, valid and test; or the name of a data set of the hub."""
    out: OutputFolder
    """Run folder to make."""
    dev: DevRows | None = None
    """Development rows, scored on the way; the best step on them becomes the result. Of a folder the file
    valid, of a data set the split validation."""

    checkpoint_every: int = 100
    """Steps between checkpoints; 0: none."""
    quiet: bool = False
    """Print no progress."""

    def resolved(self: Flags) -> Flags:
        """The same settings with absolute paths, for whoever resumes from another folder."""
        return with_absolute_paths(self, keep=hub_names(self, _ROWS), path_texts=("model",))

    def shared_problems(self, steps: int | None) -> list[str]:
        """What can't be used of the settings above; `steps` of the training, if they are known."""
        problems = bound_problems(self)
        if steps is not None:
            problems += [
                f"--evaluate-at has {step}, there are only {steps} --steps"
                for step in self.evaluate_at
                if step > steps
            ]
        if self.head_folds == 1:
            problems.append(f"--head-folds is {self.head_folds}, must be 0 or at least 2")
        if steps is not None and self.warmup is not None and self.warmup > steps:
            problems.append(f"--warmup is {self.warmup}, --steps only {steps}")
        if self.patience and not self.dev:
            problems.append("--patience needs --dev rows to judge by")
        return problems
