"""Settings of `prge compare`, and the presets that come with the package."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from prge.cli.bounds import bound_problems
from prge.cli.inputs import AdapterInput
from prge.cli.outputs import OutputFile, OutputFolder
from prge.data.options import Overflow
from prge.data.sources import Part, find_part_file
from prge.engine import EngineName
from prge.errors import ConfigError
from prge.training.optimizers import OptimizerName, ScheduleName
from prge.training.settings import ExampleFlags, TrainingFlags
from server_export.evidence.demo import DEMO, model_path
from server_export.settings import ExportConfig, PrependBos

BudgetUnit = Literal["forward_passes", "seconds", "steps"]
# Seed of a search's trials, which no reported run may have.
SEARCH_SEED = 7


@dataclass(frozen=True, kw_only=True)
class CompareSettings(ExampleFlags):
    """Compare training methods on one model, one frozen base and the same rows, at equal quality."""

    EXAMPLE: ClassVar = "--preset demo --out comparison"
    PRESETS: ClassVar = Path(__file__).with_name("presets")

    out: OutputFolder
    """Folder of the comparison. Run the same command again to continue it."""
    preset: str | None = None
    """Preset of settings: demo, minilm-sst2, stories-wikitext or smollm2-135m; flags override it."""
    json: OutputFile | None = None
    """File to write the figures of every method to as JSON."""

    model: str | None = None
    """Folder or hub id of a transformers model, or a GGUF file; demo: the included tiny model;
    random:NAME: an architecture with random weights."""
    data: str | None = None
    """Folder of the rows; demo: the included rows."""
    train: str | None = None
    """Training rows, a file in the data folder; default: its only file train, in any supported format."""
    dev: str | None = None
    """Development rows, for the choice of learning rates and the loss over time. Default: the folder's only
    file named valid, validation, dev or val."""
    test: str | None = None
    """Test rows, read once at the end of every run; default: the folder's only file named test."""
    task: str | None = None
    """Task name or YAML file, which may be in the data folder; without a task, the columns determine the form
    of a row."""
    train_start: int = 0
    """Training rows to skip at the beginning, after shuffling."""
    train_limit: int | None = None
    """Maximum number of training rows."""
    dev_start: int = 0
    """Development rows to skip, in the file's order."""
    dev_limit: int | None = None
    """Maximum number of development rows."""
    test_start: int = 0
    """Test rows to skip, in the file's order."""
    test_limit: int | None = None
    """Maximum number of test rows."""
    shuffle_seed: int | None = None
    """Shuffle the training rows with this seed before start and limit apply."""
    overflow: Overflow = TrainingFlags.overflow
    """What to do with a row that is too long."""

    methods: list[str] = field(default_factory=lambda: ["backprop-lora-fa", "p-rge", "tangent"])
    """Methods to compare, by name."""
    seeds: list[int] = field(default_factory=lambda: [42, 1337, 2025])
    """Seeds of the reported runs: row order and directions."""
    budget: BudgetUnit = "forward_passes"
    """Unit of the budget, equal for all runs: forward passes (a backward pass counts as two forward passes),
    seconds, or steps."""
    budget_value: float = 16000.0
    """Budget of each run."""
    evaluation_growth: float = 1.3
    """Factor between the forward passes after which development rows are scored, the same for every
    method."""

    quantize: str = ExportConfig.quantize
    """Frozen weights: fp32, 8da8w or 8da4w."""
    adapter: AdapterInput | None = None
    """PEFT LoRA folder that all methods start from."""
    target_modules: list[str] = field(default_factory=list)
    """Linear layers to adapt."""
    rank: int = ExportConfig.rank
    """Rank of the adapter."""
    lora_alpha: float = ExportConfig.lora_alpha
    """LoRA alpha."""
    batch_size: int = 16
    """Examples per step of a method with one query or an exact gradient; several queries share them."""
    sequence_length: int | None = ExportConfig.sequence_length
    """Maximum number of tokens in a row; default: 512, or the model's number of positions if that is less."""
    prepend_bos: PrependBos = ExportConfig.prepend_bos
    """Whether the begin-of-sequence token comes first."""

    optimizer: OptimizerName = "adam"
    """Optimizer of every method."""
    lr_scheduler_type: ScheduleName = TrainingFlags.lr_scheduler_type
    """Learning rate over the steps."""
    threads: int = 1
    """Threads of every run."""
    engine: EngineName = "auto"
    """Engine of the runs that train or score with one."""

    search_trials: int = 3
    """Learning rates to try for each method on development rows, for half a run each; 1: use its default."""
    learning_rates: dict[str, float] = field(default_factory=dict)
    """Centre of the search by method, instead of the default."""

    target: float | None = None
    """Loss to reach on development rows."""
    target_share: float = 0.8
    """Without a target: this share of the way from the start to the best of backprop-lora-fa."""

    @property
    def model_path(self) -> str:
        """The model as `prge export` takes it."""
        is_random = (self.model or "").startswith("random:")
        return str(self.out / "model") if is_random else model_path(self.model)

    @property
    def data_folder(self) -> Path:
        """The folder of the rows."""
        return DEMO if self.data == "demo" else Path(self.data or "")

    def rows_file(self, part: Part) -> Path:
        """Return the file of a part's rows; raises DataError if the folder has none, or several."""
        name: str | None = getattr(self, part)
        return find_part_file(self.data_folder, part) if name is None else self.data_folder / name

    @property
    def task_path(self) -> str | None:
        """The task as `prge run` takes it."""
        if self.task is None:
            return None
        with_rows = self.data_folder / self.task
        if with_rows.is_file():
            return str(with_rows.resolve())
        return str(Path(self.task).resolve()) if Path(self.task).is_file() else self.task

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        for name, wanted in (("model", "a folder or hub id"), ("data", "the folder of the rows")):
            if not getattr(self, name):
                problems.append(f"--{name} is missing: {wanted}")
        if not self.methods or not self.seeds:
            problems.append("give at least one method and one seed")
        if len(set(self.seeds)) < len(self.seeds):
            problems.append(f"--seeds has a seed twice: {' '.join(map(str, self.seeds))}")
        if self.search_trials > 1 and SEARCH_SEED in self.seeds:
            problems.append(f"--seeds has {SEARCH_SEED}, which is the seed of the search for learning rates")
        if self.data and not problems:
            problems += self._missing_files()
        if problems:
            raise ConfigError(
                "Cannot compare with these settings:",
                problems,
                remedy="`prge compare --help` explains the settings.",
                code="settings-unusable",
            )

    def _missing_files(self) -> list[str]:
        problems = []
        model = self.model or ""
        if model.startswith((".", "/", "~")) and not (Path(model).is_dir() or Path(model).is_file()):
            problems.append(f"--model is {model}, and there is no such folder or file")
        if not self.data_folder.is_dir():
            return [*problems, f"--data is {self.data}, and there is no such folder"]
        return problems + [
            f"--{split} is {name}, and {self.data_folder} has no such file"
            for split, name in (("train", self.train), ("dev", self.dev), ("test", self.test))
            if name is not None and not (self.data_folder / name).is_file()
        ]
