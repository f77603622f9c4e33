"""Settings of `prge tune`, without imports of torch, since the command line reads the help from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from prge.cli.bounds import bound_problems
from prge.cli.field_types import Bytes
from prge.cli.inputs import BundleInput, DevRows, InputFolder, RewardInput, TestRows, TrainRows
from prge.cli.outputs import OutputFile, OutputFolder
from prge.cli.settings import with_absolute_paths
from prge.data.options import Overflow
from prge.data.sources import hub_names
from prge.errors import ConfigError
from prge.formats.run_folder import CONFIG
from prge.formats.signatures import DECODE, FORWARD, PREFILL
from prge.objectives.preferences import ObjectiveFlags
from prge.training.estimators.rewards import RewardFlags, reward_problems
from prge.training.estimators.table import ESTIMATORS, EstimatorName
from prge.training.settings import ExampleFlags, OptimizerFlags, TrainingFlags
from server_export.settings import SCHEMES, AdapterType, Init, PrependBos, roles_problems

OnBadRow = Literal["stop", "skip"]


@dataclass(frozen=True)
class TuneSettings(ObjectiveFlags, RewardFlags, ExampleFlags):
    """Tune a model on rows: export, choose settings, search the learning rate, train, score, publish.

    Settings that you leave out are decided from measurements.
    """

    EXAMPLE: ClassVar = "rows.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct --out tuned"
    ONE_OF: ClassVar = (("model", "bundle"),)
    STORED: ClassVar = CONFIG

    data: TrainRows
    """Training rows: one or several files; a folder with files train, valid and test, which are all used; or
    a data set of the hub."""
    out: OutputFolder
    """Folder for bundle, run, adapter and report."""
    model: str | None = None
    """Folder or hub id of a transformers causal language model or encoder, or a GGUF file."""
    bundle: BundleInput | None = None
    """Bundle of `prge export`, instead of a model."""
    dev: DevRows | None = None
    """Development rows, for choosing the learning rate and the best step. Default: a part of the training
    rows, by a hash of their content."""
    test: TestRows | None = None
    """Rows to score once before and once after training. Default: the development rows."""
    reward: RewardInput | None = None
    """Learn from a reward of generated text instead of answers, as in `prge run`: FILE.py:FUNCTION or a YAML
    file of rules. Rows need only prompts. Development prompts are scored by the mean reward of the most
    likely completions."""
    on_bad_row: OnBadRow = "stop"
    """What to do with rows that can't be read or trained on: stop before anything is written, or skip them.
    All of them are listed."""
    overflow: Overflow = "auto"
    """What to do with rows that are too long for the model: error, truncate or split; auto: split texts, and
    chats between turns; truncate all others."""
    max_dropped: float = TrainingFlags.max_dropped
    """Largest share of target tokens that may be left out because rows are too long."""
    memory: Bytes | None = None
    """Memory limit of processes that train or score, as for `prge run`, such as 400MB. Too low a limit is
    refused before the export, whose own memory `prge estimate` shows. Default: no limit; on a phone, half of
    its free memory."""
    minutes: float | None = None
    """Time limit in minutes, including the export, which determines the steps. Default: no limit."""

    chat_template: str | None = None
    """How messages become text: a Jinja file, or `plain`. Default: the tokenizer's own template, or plain if
    it has none."""
    prepend_bos: PrependBos | None = None
    """Whether every text begins with the begin-of-sequence token: always, never, or auto for the tokenizer's
    own behavior. Default: whichever gives the frozen model the lower loss."""
    quantize: str | None = None
    """Quantization of the frozen weights: fp32, 8da8w or 8da4w. Default: by the size of the model."""
    sequence_length: int | None = None
    """Maximum number of tokens in a row. Default: the longest row's, up to the positions of the model."""
    target_modules: list[str] | None = None
    """Linear layers to adapt. Default: all-linear for exact gradients, else PEFT's default for the
    architecture."""
    adapt_layers: str | None = None
    """`top:k`: adapt only the top k blocks. Default: all blocks."""
    adapter: AdapterType | None = None
    """What is trained: lora, both matrices; or lora-fa, only lora_b. Default: lora for exact gradients of a
    decoder, else lora-fa."""
    rank: int | None = None
    """Rank of the adapter. Default: 16 for exact gradients, else 8."""
    init: Init | None = None
    """Initialization of lora_a: eva, principal directions of the layers' inputs for the training rows; or
    random. Default: random; eva if exact gradients adapt only queries and values."""
    estimator: EstimatorName | None = None
    """Gradient estimator. Default: exact, the gradient by backpropagation; antithetic for --objective es."""
    roles: list[str] | None = None
    """Roles of the exported programs, as for `prge export`. Default: the roles that this tuning needs; other
    estimators need more."""
    batch_size: int | None = None
    """Examples of an optimizer step; gradients are accumulated if they don't fit into memory together.
    Default: by the number of rows."""
    head_folds: int | None = None
    """Encoders: number of folds of the heads that score training rows; 0: none. Default: 10, or 0 if a class
    has few rows."""
    steps: int | None = None
    """Steps of the final run. Default: by the number of rows, and by --minutes."""
    epochs: float | None = None
    """Epochs of the final run, instead of --steps; may be a fraction, such as 0.5."""
    learning_rate: float | None = None
    """Peak learning rate. Default: the best one of a search by short runs."""
    epsilon: float | None = None
    """es: size of the perturbation of each adapter value, the standard deviation of the search distribution.
    Default: the best one of a search by short runs."""
    weight_decay: float = OptimizerFlags.weight_decay
    """Decoupled weight decay of all trained matrices, as in AdamW."""
    seed: int = 42
    """Seed of the order of rows and of random numbers."""
    threads: int | None = None
    """Number of threads of the engine; default: one for each performance core."""
    on: str | None = None
    """android, or android:SERIAL with a serial of `adb devices`: execute all runs on that phone, which needs
    the runtime of `prge android push`. Default: this machine."""
    phone_folder: str | None = None
    """prge's folder on the phone; default: that of `prge android`."""
    json: OutputFile | None = None
    """JSON file to write scores, decisions, memory and seconds to."""
    resume: InputFolder | None = None
    """Folder of an interrupted tuning to resume."""

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
                    f"--adapter is {self.adapter}, but --bundle is given: a bundle has one type of adapter, "
                    f"which `prge export --adapter {self.adapter}` chooses"
                )
        problems += roles_problems(self.roles or ())
        problems += self._reward_problems()
        if self.quantize is not None and self.quantize not in SCHEMES:
            problems.append(f"--quantize is {self.quantize!r}, must be one of {', '.join(SCHEMES)}")
        lengths = [f"--{name}" for name in ("steps", "epochs", "minutes") if getattr(self, name) is not None]
        if len(lengths) > 1:
            problems.append(f"{' and '.join(lengths)} each determine the steps: give only one of them")
        device, colon, serial = (self.on or "android").partition(":")
        if device != "android" or (colon and not serial):
            problems.append(f"--on is {self.on!r}, must be android or android:SERIAL")
        if self.phone_folder is not None and self.on is None:
            problems.append("--phone-folder belongs to --on android")
        if problems:
            raise ConfigError(
                "These settings can't be used:",
                problems,
                remedy="See `prge tune --help`.",
                code="settings-unusable",
            )

    def _reward_problems(self) -> list[str]:
        """Return problems of settings of learning from a reward."""
        problems = reward_problems(self, self.reward, self, self.task)
        if self.reward is not None and self.roles is not None and not {PREFILL, DECODE} <= {*self.roles}:
            problems.append("--roles lacks prefill and decode, which write the completions of a --reward")
        if self.objective == "es" and self.estimator and ESTIMATORS[self.estimator].role != FORWARD:
            problems.append(
                f"--objective es compares perturbed adapters, and --estimator is {self.estimator}: choose "
                "antithetic or fzoo, or --objective grpo"
            )
        if self.epsilon is not None and not self.is_evolution:
            problems.append("--epsilon is for --objective es")
        return problems

    @property
    def chosen_estimator(self) -> EstimatorName | None:
        """The estimator that the user chose, also by the objective; None: to be decided."""
        return self.estimator or ("antithetic" if self.objective == "es" else None)

    @property
    def is_evolution(self) -> bool:
        """Whether evolution strategies learn from a reward."""
        estimator = self.chosen_estimator
        compares = estimator is not None and ESTIMATORS[estimator].role == FORWARD
        return self.reward is not None and compares and self.objective != "grpo"

    @property
    def serial(self) -> str | None:
        """Serial of the phone that `on` names; None if it names none."""
        return (self.on or "").partition(":")[2] or None

    def resolved(self) -> TuneSettings:
        """Return the same settings with absolute paths, so that the tuning can be resumed from any folder."""
        data = hub_names(self, ("data", "dev", "test"))
        return with_absolute_paths(
            self, keep=data, file_texts=("task", "chat_template"), path_texts=["model"]
        )
