"""Settings of `prge leak`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from prge.errors import ConfigError
from prge.running.training_flags import ExampleFlags
from prge.verbs.bounds import bound_problems
from prge.verbs.inputs import AdapterInput, BundleInput, TrainRows
from prge.verbs.kinds import Paths
from prge.verbs.outputs import OutputFile
from server_export.evidence.demo import DEMO, model_path
from server_export.settings import ExportConfig

ReportName = Literal["exact", "top", "scalars"]
Objective = Literal["dlg", "cosine"]


# What only scalars have.
_OF_SCALARS = ("queries", "steps")


@dataclass(frozen=True)
class Case:
    """One thing to attack: a kind of report, and what it is of.

    `noise` is its standard deviation as a share of what a row may change at most; `queries` and `steps` are
    of scalars. `varied` is the setting that differs from the case of the middle; none in that one.
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
    """Try to read rows from what a device of a fleet would send of them. Failing is no proof of safety."""

    PRESETS: ClassVar = Path(__file__).with_name("presets")

    preset: str | None = None
    """Settings to begin with: demo, the tiny model that comes along; flags win over them."""
    model: str | None = None
    """Folder, GGUF file or hub id of the model; demo: the one that comes along."""
    bundle: BundleInput | None = None
    """Bundle of this model, whose lora_a and adapter are attacked. Without one they are drawn as
    `prge export` draws them, anew for every seed."""
    adapter: AdapterInput | None = None
    """PEFT folder of the adapter that the rows are learnt with, such as `final` of a run."""
    rows: TrainRows | None = None
    """Rows to attack, which the adversary must not know; demo: test rows of the demo."""
    task: str | None = None
    """Task of the rows, as for `prge run`, with candidates of one token each: its text and its label are
    attacked, not its template. Without one, rows are texts."""
    target_modules: list[str] = field(default_factory=list)
    """Linear layers to adapt, without a bundle."""

    reports: list[ReportName] = field(default_factory=lambda: ["exact", "top", "scalars"])
    """What is sent: exact (the gradient), top (its largest values), scalars (its projections)."""
    lengths: list[int] = field(default_factory=lambda: [8, 2, 4, 16])
    """Unknown tokens of a row. Of this list and those below, the first is what the others are compared with:
    each of them is tried with the first of all other lists."""
    ranks: list[int] = field(default_factory=lambda: [8])
    """Ranks of the adapter; those of a bundle or a PEFT folder are its own."""
    batches: list[int] = field(default_factory=lambda: [1])
    """Rows that a report is the mean of."""
    queries: list[int] = field(default_factory=lambda: [4])
    """Scalars of a step."""
    steps: list[int] = field(default_factory=lambda: [10, 1, 100, 1000])
    """Steps whose scalars are known, all of the same rows at the same adapter, which is the adversary's best
    case."""
    noise: list[float] = field(default_factory=lambda: [0.0])
    """Deviation of Gaussian noise, as a share of what one row can change a step's report by."""
    top_share: float = 0.01
    """Share of a gradient's values that `top` sends."""

    seeds: list[int] = field(default_factory=lambda: [42, 1337, 2025])
    """Seeds: of the rows' choice, lora_a, directions, noise, and what an attack tries."""
    limit: int = 4
    """Reports to attack for each seed."""
    samples: int = 512
    """Texts that the model writes to begin with."""
    guesses: int = 6000
    """Gradients of guesses that an attack computes at most, a batch's row each."""
    objectives: list[Objective] = field(default_factory=lambda: ["cosine"])
    """How embeddings are matched to the report first: dlg (squared distance) or cosine."""
    matching_steps: int = 100
    """Steps of the optimizer that matches embeddings."""

    json: OutputFile | None = None
    """File to write all figures to as JSON."""
    out: OutputFile | None = None
    """Picture of the token recovery, an SVG file."""

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
        """What gives the adapter without a bundle."""
        return ExportConfig(
            model=self.model_path,
            out=Path("."),
            start_adapter=self.adapter,
            target_modules=self.target_modules or None,
        )

    @property
    def lists(self) -> dict[str, list[Any]]:
        """The values of every setting of a case."""
        return {
            "rank": self.ranks,
            "length": self.lengths,
            "batch": self.batches,
            "queries": self.queries,
            "steps": self.steps,
            "noise": self.noise,
        }

    def cases(self) -> Iterator[Case]:
        """What to attack: a case of every report in the middle, and one for each other value of a list."""
        for report in self.reports:
            own = [name for name in self.lists if report == "scalars" or name not in _OF_SCALARS]
            middle = Case(report, **{name: self.lists[name][0] for name in own})
            yield middle
            for name in own:
                for value in self.lists[name][1:]:
                    yield replace(middle, varied=name, **{name: value})

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        for name in ("model", "rows"):
            if self.preset is None and getattr(self, name) is None:
                problems.append(f"--{name} is missing")
        for name in ("reports", "lengths", "ranks", "batches", "queries", "steps", "noise", "seeds"):
            if not getattr(self, name):
                problems.append(f"--{name} is empty")
        if self.bundle is not None and self.target_modules:
            problems.append("a bundle has its own layers: leave out --target-modules")
        if (self.bundle is not None or self.adapter is not None) and len(self.ranks) > 1:
            problems.append("a bundle or an adapter has its own rank: leave out --ranks")
        if self.out is not None and self.out.suffix != ".svg":
            problems.append(f"--out is {self.out}, must end in .svg")
        if problems:
            raise ConfigError(
                "this can't be attacked:",
                problems,
                remedy="`prge leak --help` explains the settings",
                code="settings-unusable",
            )
