"""Settings of `prge compare`, and the presets that come with the package."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from prge.engine import EngineName
from prge.errors import ConfigError
from prge.learning.optimizers import OptimizerName, ScheduleName
from prge.rows.build_options import Overflow
from prge.rows.sources import Part, file_of_part
from prge.running.training_flags import ExampleFlags, TrainingFlags
from prge.verbs.bounds import bound_problems
from prge.verbs.inputs import AdapterInput
from prge.verbs.outputs import OutputFile, OutputFolder
from server_export.evidence.demo import DEMO, model_path
from server_export.settings import ExportConfig, PrependBos

BudgetKind = Literal["rows", "seconds", "steps"]
# Of the trials of a search; none of the reported ones.
SEARCH_SEED = 7


@dataclass(frozen=True, kw_only=True)
class CompareSettings(ExampleFlags):
    """Compare training methods on one model, one frozen base and the same rows, at equal quality."""

    PRESETS: ClassVar = Path(__file__).with_name("presets")

    out: OutputFolder
    """Folder of the comparison; the same command goes on with it."""
    preset: str | None = None
    """Settings to begin with: demo, minilm-sst2, stories-wikitext or smollm2-135m; flags win over them."""
    json: OutputFile | None = None
    """File to write the figures of every method to as JSON."""

    model: str | None = None
    """Folder or hub id of a transformers model, or a GGUF file; demo: the tiny one that comes along;
    random:NAME: an architecture with random weights."""
    data: str | None = None
    """Folder of the rows; demo: those that come along."""
    train: str | None = None
    """Training rows, a file in the data folder; default: its one file train, in any format of rows."""
    dev: str | None = None
    """Development rows: they choose learning rates, and the loss over time is measured on them. Default: the
    folder's one file valid, validation, dev or val."""
    test: str | None = None
    """Test rows, read once at the end of every run; default: the folder's one file test."""
    task: str | None = None
    """Task name, or a YAML file, which may lie in the data folder; without one, the columns say what a row
    is."""
    train_start: int = 0
    """Training rows to leave out at the file's beginning, after shuffling."""
    train_limit: int | None = None
    """Most training rows."""
    dev_start: int = 0
    """Development rows to leave out, in the file's order."""
    dev_limit: int | None = None
    """Most development rows."""
    test_start: int = 0
    """Test rows to leave out, in the file's order."""
    test_limit: int | None = None
    """Most test rows."""
    shuffle_seed: int | None = None
    """Shuffle the training file before its start and limit."""
    overflow: Overflow = TrainingFlags.overflow
    """What to do with a row that is too long."""

    methods: list[str] = field(default_factory=lambda: ["backprop-lora-fa", "p-rge", "tangent"])
    """Methods to compare, by name."""
    seeds: list[int] = field(default_factory=lambda: [42, 1337, 2025])
    """Seeds of the reported runs: row order and directions."""
    budget: BudgetKind = "rows"
    """What all runs get as much of: rows computed (a backward counts as two forwards), seconds, or steps."""
    budget_value: float = 16000.0
    """How much of it a run gets."""
    evaluation_growth: float = 1.3
    """Development rows are scored after as many rows as one step computes, then each time this many times
    as many: at the same rows for every method."""

    quantize: str = ExportConfig.quantize
    """Frozen weights: fp32, 8da8w or 8da4w."""
    adapter: AdapterInput | None = None
    """PEFT LoRA folder that all methods' bundles start from."""
    target_modules: list[str] = field(default_factory=list)
    """Linear layers to adapt."""
    rank: int = ExportConfig.rank
    """Rank of the adapter."""
    alpha: float = ExportConfig.alpha
    """LoRA alpha."""
    batch_size: int = 16
    """Examples of a step of a method with one query or an exact gradient; queries share them."""
    sequence_length: int | None = ExportConfig.sequence_length
    """Most tokens of a row; without it 512, or as many as the model has positions."""
    prepend_bos: PrependBos = ExportConfig.prepend_bos
    """Whether the begin-of-sequence token comes first."""

    optimizer: OptimizerName = "adam"
    """Optimizer of every method."""
    schedule: ScheduleName = TrainingFlags.schedule
    """Learning rate over the steps."""
    threads: int = 1
    """Threads of every run."""
    engine: EngineName = "auto"
    """Engine of the runs that train or score on one."""

    search_trials: int = 3
    """Learning rates tried for each method on development rows, for half a run each; 1: its default is
    taken."""
    learning_rates: dict[str, float] = field(default_factory=dict)
    """Centres of the search by method, instead of the methods' own."""

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
        """Where the rows lie."""
        return DEMO if self.data == "demo" else Path(self.data or "")

    def rows_file(self, part: Part) -> Path:
        """The file of a part's rows; raises DataError where the folder has none, or several."""
        name: str | None = getattr(self, part)
        return file_of_part(self.data_folder, part) if name is None else self.data_folder / name

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
            problems.append("at least one method and one seed are needed")
        if len(set(self.seeds)) < len(self.seeds):
            problems.append(f"--seeds has one twice: {' '.join(map(str, self.seeds))}")
        if self.search_trials > 1 and SEARCH_SEED in self.seeds:
            problems.append(f"--seeds has {SEARCH_SEED}, which is that of the search for learning rates")
        if self.data and not problems:
            problems += self._missing_files()
        if problems:
            raise ConfigError(
                "this can't be compared:",
                problems,
                remedy="`prge compare --help` explains the settings",
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
