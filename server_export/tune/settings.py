"""Settings of `prge tune`. Importable without torch: the command line reads its help from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from prge.errors import ConfigError
from prge.files.run_folder import CONFIG
from prge.learning.estimators.table import EstimatorName
from prge.learning.preferences import ObjectiveFlags
from prge.rows.build_options import Overflow
from prge.rows.sources import hub_names
from prge.running.training_flags import ExampleFlags, OptimizerFlags, TrainingFlags
from prge.verbs.bounds import bound_problems
from prge.verbs.inputs import BundleInput, DevRows, InputFolder, TestRows, TrainRows
from prge.verbs.kinds import Bytes
from prge.verbs.outputs import OutputFile, OutputFolder
from prge.verbs.settings import with_whole_paths
from server_export.settings import SCHEMES, AdapterKind, Init, PrependBos, roles_problems

OnBadRow = Literal["stop", "skip"]


@dataclass(frozen=True)
class TuneSettings(ObjectiveFlags, ExampleFlags):
    """Tune a model on rows: export, choose, find the learning rate, train, score, publish.

    Whatever is left out is decided from measured facts.
    """

    ONE_OF: ClassVar = (("model", "bundle"),)
    STORED: ClassVar = CONFIG

    data: TrainRows
    """Training rows: a file, or several one after another; a folder with files train, valid and test, of
    which the two others are taken as well; or a data set of the hub."""
    out: OutputFolder
    """Folder for bundle, run, adapter and report."""
    model: str | None = None
    """Folder or hub id of a transformers causal language model or encoder, or a GGUF file."""
    bundle: BundleInput | None = None
    """Bundle that `prge export` wrote, instead of a model."""
    dev: DevRows | None = None
    """Development rows, which choose the learning rate and the step. Default: a part of the training rows,
    by a hash of their content."""
    test: TestRows | None = None
    """Rows that are scored once before and once after. Default: the development rows."""
    on_bad_row: OnBadRow = "stop"
    """What becomes of rows that can't be read or learnt from: stop before anything is made, or skip them. All
    are told."""
    overflow: Overflow = "auto"
    """Rows that are longer than the model takes: error, truncate or split; auto: texts and chats are split,
    chats between turns, all else is truncated."""
    max_dropped: float = TrainingFlags.max_dropped
    """Largest share of target tokens that may be left out because rows are too long."""
    memory: Bytes | None = None
    """Most memory that a process takes which trains or scores, as of `prge run`, such as 400MB; too little is
    refused before the export, which takes what `prge estimate` says. Default: no bound; on a phone half of
    what it has free."""
    minutes: float | None = None
    """Minutes that all of it should take, the export too: they choose the steps. Default: as the rows ask."""

    chat_template: str | None = None
    """How messages become text: a Jinja file, or `plain`. Default: the tokenizer's own, plain where it has
    none."""
    prepend_bos: PrependBos | None = None
    """Whether every text begins with the begin-of-sequence token: always, never, or auto, as the tokenizer
    does by itself. Default: what gives the frozen model the lower loss."""
    quantize: str | None = None
    """Frozen weights: fp32, 8da8w or 8da4w. Default: by the size of the model."""
    sequence_length: int | None = None
    """Most tokens of a row. Default: as many as the longest row has, where the model has the positions."""
    target_modules: list[str] | None = None
    """Linear layers to adapt. Default: all-linear for exact gradients, else PEFT's usual choice for the
    architecture."""
    adapt_layers: str | None = None
    """`top:k`: adapt the top k blocks only. Default: all."""
    adapter: AdapterKind | None = None
    """What is trained: lora, both matrices, or lora-fa, lora_b alone. Default: lora for exact
    gradients of a decoder."""
    rank: int | None = None
    """Rank of the adapter. Default: 16 for exact gradients, else 8."""
    init: Init | None = None
    """Where the lora_a come from: eva, principal directions of what layers see of the training rows; or
    random. Default: random; eva where exact gradients adapt queries and values alone."""
    estimator: EstimatorName | None = None
    """Default: exact, the gradient by backpropagation."""
    roles: list[str] | None = None
    """Roles of the exported programs, as of `prge export`. Default: those that this tuning uses;
    other estimators need more."""
    batch_size: int | None = None
    """Examples of an optimizer step; those that don't fit into memory together are added up. Default: by the
    number of rows."""
    head_folds: int | None = None
    """Encoders: folds of the heads that score training rows; 0: none. Default: 10, none where a class has few
    rows."""
    steps: int | None = None
    """Steps of the final run. Default: by the number of rows, and by --minutes."""
    epochs: float | None = None
    """Times that the final run sees every training row, instead of --steps; may be a part, such as 0.5."""
    learning_rate: float | None = None
    """Peak learning rate. Default: found by short runs."""
    weight_decay: float = OptimizerFlags.weight_decay
    """Decoupled weight decay, as AdamW's: of all trained matrices."""
    seed: int = 42
    """Of the order of rows and of random numbers."""
    threads: int | None = None
    """Threads of the engine; default: performance cores."""
    on: str | None = None
    """android, or android:SERIAL as `adb devices` lists it: all runs take place on that phone, which has the
    runtime of `prge android push`. Default: here."""
    phone_folder: str | None = None
    """prge's folder on the phone; default: that of `prge android`."""
    json: OutputFile | None = None
    """File to write scores, decisions, memory and seconds to as JSON."""
    resume: InputFolder | None = None
    """Folder of a tuning that was ended, to go on with it."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        if self.bundle is not None:
            exports = (
                *("chat_template", "prepend_bos", "roles"),
                *("quantize", "sequence_length", "target_modules", "adapt_layers", "init"),
            )
            problems += [
                f"--{name.replace('_', '-')} belongs to an export, but --bundle is given"
                for name in exports
                if getattr(self, name) is not None
            ]
            if self.adapter is not None:
                problems.append(
                    f"--adapter is {self.adapter}, but --bundle is given: a bundle is of one kind, which "
                    f"`prge export --adapter {self.adapter}` chooses"
                )
        problems += roles_problems(self.roles or ())
        if self.quantize is not None and self.quantize not in SCHEMES:
            problems.append(f"--quantize is {self.quantize!r}, must be one of {', '.join(SCHEMES)}")
        lengths = [f"--{name}" for name in ("steps", "epochs", "minutes") if getattr(self, name) is not None]
        if len(lengths) > 1:
            problems.append(f"{' and '.join(lengths)}: each chooses the steps, give one of them")
        device, colon, serial = (self.on or "android").partition(":")
        if device != "android" or (colon and not serial):
            problems.append(f"--on is {self.on!r}, must be android or android:SERIAL")
        if self.phone_folder is not None and self.on is None:
            problems.append("--phone-folder belongs to --on android")
        if problems:
            raise ConfigError(
                "these settings can't be used:",
                problems,
                remedy="see `prge tune --help`",
                code="settings-unusable",
            )

    @property
    def serial(self) -> str | None:
        """The phone that `on` names."""
        return (self.on or "").partition(":")[2] or None

    def resolved(self) -> TuneSettings:
        """The same settings with absolute paths, for whoever resumes from another folder."""
        data = hub_names(self, ("data", "dev", "test"))
        return with_whole_paths(self, leave=data, texts=("task", "chat_template"), places=["model"])
