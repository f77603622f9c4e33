"""Settings of `prge leak`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from prge.cli.bounds import bound_problems
from prge.cli.field_types import Paths
from prge.cli.inputs import AdapterInput, BundleInput, TrainRows
from prge.cli.outputs import OutputFile
from prge.errors import ConfigError
from prge.training.settings import ExampleFlags
from server_export.evidence.demo import DEMO, model_path
from server_export.settings import ExportConfig

ReportName = Literal["exact", "top", "scalars"]
MatchingObjective = Literal["dlg", "cosine"]


# Settings that apply to scalars only.
_PROJECTION_SETTINGS = ("queries", "steps")


@dataclass(frozen=True)
class AttackCase:
    """A type of report to attack, and its settings.

    `noise` is its standard deviation relative to the largest effect of a row; `queries` and `steps` apply to
    scalars only. `varied` is the setting that differs from the base case; it is empty in the base case.
    """

    report: ReportName
    rank: int
    length: int
    batch: int
    noise: float
    queries: int = 0
    steps: int = 1
    varied: str = ""


@dataclass(frozen=True)
class LeakSettings(ExampleFlags):
    """Try to reconstruct rows from the reports of a fleet's device. Failure is no proof of safety."""

    EXAMPLE: ClassVar = "--preset demo --out leak.svg"
    PRESETS: ClassVar = Path(__file__).with_name("presets")

    preset: str | None = None
    """Preset of settings: demo, the included tiny model; flags override it."""
    model: str | None = None
    """Folder, GGUF file or hub id of the model; demo: the included one."""
    bundle: BundleInput | None = None
    """Bundle of this model, whose lora_a and adapter are attacked. Without it, they are initialized as in
    `prge export`, anew for every seed."""
    adapter: AdapterInput | None = None
    """PEFT folder of the adapter that trains on the rows, such as `final` of a run."""
    rows: TrainRows | None = None
    """Rows to attack, which the adversary does not know; demo: test rows of the demo."""
    task: str | None = None
    """Task of the rows, as in `prge run`, with candidates of one token each: text and label are attacked, the
    template is known. Without a task, rows are texts."""
    target_modules: list[str] = field(default_factory=list)
    """Linear layers to adapt if there is no bundle."""

    reports: list[ReportName] = field(default_factory=lambda: ["exact", "top", "scalars"])
    """Contents of reports: exact (the gradient), top (its largest values), scalars (projected gradients)."""
    lengths: list[int] = field(default_factory=lambda: [8, 2, 4, 16])
    """Unknown tokens of a row. The first values of this list and those below form the base case; every other
    value is tried with the first values of all other lists."""
    ranks: list[int] = field(default_factory=lambda: [8])
    """Ranks of the adapter; a bundle or a PEFT folder has its own rank."""
    batches: list[int] = field(default_factory=lambda: [1])
    """Number of rows in a report, which is their mean."""
    queries: list[int] = field(default_factory=lambda: [4])
    """Projected gradients of a step."""
    steps: list[int] = field(default_factory=lambda: [10, 1, 100, 1000])
    """Steps whose projected gradients are known, all with the same rows and adapter: the adversary's best
    case."""
    noise: list[float] = field(default_factory=lambda: [0.0])
    """Standard deviation of Gaussian noise, relative to the largest effect of a row on a step's report."""
    top_share: float = 0.01
    """Share of a gradient's values in the report `top`."""

    seeds: list[int] = field(default_factory=lambda: [42, 1337, 2025])
    """Seeds of the choice of rows, lora_a, directions, noise and the attack."""
    limit: int = 4
    """Number of reports to attack for each seed."""
    samples: int = 512
    """Number of texts that the model generates to start the attack with."""
    guesses: int = 6000
    """Maximum number of gradients that an attack computes, one for each row of a guess."""
    objectives: list[MatchingObjective] = field(default_factory=lambda: ["cosine"])
    """Objectives for matching embeddings to the report: dlg (squared distance) or cosine."""
    matching_steps: int = 100
    """Optimizer steps for matching embeddings."""

    json: OutputFile | None = None
    """File to write all figures to as JSON."""
    out: OutputFile | None = None
    """SVG file for a chart of the token recovery."""

    @property
    def model_path(self) -> str:
        """The model as `prge export` takes it."""
        return model_path(self.model)

    @property
    def rows_path(self) -> Paths:
        """The files of rows."""
        assert self.rows is not None
        return DEMO / "test.jsonl" if str(self.rows) == "demo" else self.rows

    @property
    def export(self) -> ExportConfig:
        """Settings of the export that initializes the adapter if there is no bundle."""
        return ExportConfig(
            model=self.model_path,
            out=Path("."),
            start_adapter=self.adapter,
            target_modules=self.target_modules or None,
        )

    @property
    def lists(self) -> dict[str, list[Any]]:
        """The values of every setting of a case, by name."""
        return {
            "rank": self.ranks,
            "length": self.lengths,
            "batch": self.batches,
            "queries": self.queries,
            "steps": self.steps,
            "noise": self.noise,
        }

    def cases(self) -> Iterator[AttackCase]:
        """Yield the base case of every report, and a case for each other value of a list."""
        for report in self.reports:
            names = [name for name in self.lists if report == "scalars" or name not in _PROJECTION_SETTINGS]
            base = AttackCase(report, **{name: self.lists[name][0] for name in names})
            yield base
            for name in names:
                for value in self.lists[name][1:]:
                    yield replace(base, varied=name, **{name: value})

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        for name in ("model", "rows"):
            if self.preset is None and getattr(self, name) is None:
                problems.append(f"--{name} is missing")
        for name in ("reports", "lengths", "ranks", "batches", "queries", "steps", "noise", "seeds"):
            if not getattr(self, name):
                problems.append(f"--{name} is empty")
        if self.bundle is not None and self.target_modules:
            problems.append("a bundle has its own layers: remove --target-modules")
        if (self.bundle is not None or self.adapter is not None) and len(self.ranks) > 1:
            problems.append("a bundle or an adapter has its own rank: remove --ranks")
        if self.out is not None and self.out.suffix != ".svg":
            problems.append(f"--out is {self.out}, must end in .svg")
        if problems:
            raise ConfigError(
                "Cannot attack with these settings:",
                problems,
                remedy="`prge leak --help` explains the settings.",
                code="settings-unusable",
            )
