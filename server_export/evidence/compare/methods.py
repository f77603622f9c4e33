"""The methods that can be compared: what each is, and the settings that export, train and score it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prge.contract import ROWS_OF_A_WAY_BACK
from prge.errors import ConfigError
from prge.learning.estimators.table import ESTIMATORS, EstimatorName
from server_export.evidence.baselines.methods import METHODS as PYTORCH
from server_export.evidence.compare.settings import CompareSettings
from server_export.settings import ExportConfig

Family = Literal["engine", "pytorch"]


@dataclass(frozen=True)
class Method:
    """One way to train.

    `forward_only` says whether its gradients come from forward passes. An engine method has an `estimator`
    of `prge run` and the number of `queries` of a step, which share the batch: batch_size / queries
    examples a step; `directions` where a step has another number of them; `copies` of the adapter in a call,
    where not all are. `export` and `run` are settings of its own: with an export's it has its own bundle.
    `learning_rate` is the centre of its search, `optimizer` the only one that it has.
    `title` says in a report what the method is.
    """

    name: str
    family: Family
    forward_only: bool
    title: str
    learning_rate: float
    estimator: EstimatorName | None = None
    queries: int = 1
    copies: int | None = None
    directions: int | None = None
    export: Mapping[str, Any] | None = None
    run: Mapping[str, Any] | None = None
    optimizer: str | None = None

    @property
    def verb(self) -> str:
        """The verb that trains it."""
        return "run" if self.family == "engine" else "baseline"

    @property
    def has_directions(self) -> bool:
        """Whether its steps have random directions on the engine."""
        return self.estimator is not None and ESTIMATORS[self.estimator].has_directions

    def examples(self, batch_size: int) -> int:
        """Training examples of a step."""
        return max(1, batch_size // self.queries)

    def rows(self, batch_size: int) -> int:
        """Rows that a step computes; a backward counts as two forwards."""
        examples = self.examples(batch_size)
        if self.estimator is not None:
            return ESTIMATORS[self.estimator].rows(self.directions or self.queries) * examples
        return (2 if self.forward_only else ROWS_OF_A_WAY_BACK) * examples


def _antithetic(queries: int, name: str) -> Method:
    pairs = f"{queries} pairs" if queries > 1 else "a pair"
    title = f"P-RGE: differences between the losses of {pairs} of perturbed adapters, all in one call"
    return Method(name, "engine", True, title, 5e-3, estimator="antithetic", queries=queries)


def _tangent(queries: int, name: str) -> Method:
    title = f"forward-mode differentiation: exact derivatives of the loss along {queries} random directions"
    return Method(name, "engine", True, title, 5e-3, estimator="tangent", queries=queries)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _antithetic(4, "p-rge"),
        _antithetic(1, "p-rge-q1"),
        _antithetic(2, "p-rge-q2"),
        _antithetic(16, "p-rge-q16"),
        _tangent(4, "tangent"),
        _tangent(16, "tangent-q16"),
        # The scalars of p-rge-q1: its two copies in calls of their own.
        Method(
            "mezo-lora-fa", "engine", True,
            "MeZO on the same adapter: a pair of perturbed adapters, one in a call", 5e-3,
            estimator="antithetic", queries=1, copies=1,
        ),
        # Seven perturbed copies and a clean one: as many as p-rge has.
        Method(
            "fzoo", "engine", True,
            "FZOO: 7 perturbed adapters against an unperturbed one, divided by their losses' deviation", 5e-3,
            estimator="fzoo", queries=4, directions=7,
        ),
        Method(
            "exact", "engine", False,
            "backpropagation through the same adapter, as a graph that the engine runs", 1e-2,
            estimator="exact",
        ),
        Method(
            "exact-top2", "engine", False,
            "backpropagation on the engine, top 2 blocks alone; what lies below is computed once a row", 1e-2,
            estimator="exact", export={"adapt_layers": "top:2", "roles": ["stack", "back"]},
            run={"trunk_cache_bytes": 1 << 30},
        ),
        *(
            Method(
                name, "pytorch", entry.forward_only, entry.title, entry.learning_rate,
                optimizer=entry.optimizers[0] if len(entry.optimizers) == 1 else None,
            )
            for name, entry in PYTORCH.items()
        ),
    )
}  # fmt: skip


def chosen_methods(names: Iterable[str], batch_size: int) -> list[Method]:
    """The methods of some names, in their order, each once.

    Raises:
        ConfigError: unknown ones, with the nearest that there is; or a batch that their queries don't divide.
    """
    names = list(dict.fromkeys(names))
    problems = []
    for name in names:
        if name not in METHODS:
            nearest = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.4)
            problems.append(f"{name!r} is unknown" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        elif batch_size % METHODS[name].queries:
            queries = METHODS[name].queries
            problems.append(f"{name}: its {queries} queries share a batch, and {batch_size} is no multiple")
    if problems:
        remedy = f"methods: {', '.join(METHODS)}"
        raise ConfigError("these methods can't be compared:", problems, remedy=remedy)
    return [METHODS[name] for name in names]


def export_settings(method: Method, settings: CompareSettings) -> dict[str, Any]:
    """Settings of `prge export` for the bundle that a method runs on, but for its folder.

    All methods without settings of their own share one; PyTorch's read its frozen base and lora_a.
    """
    chosen: dict[str, Any] = {
        "model": settings.model_path,
        "quantize": settings.quantize,
        "prepend_bos": settings.prepend_bos,
        "sequence_length": settings.sequence_length,
    }
    own = method.export or {}
    if settings.adapter is not None and "adapt_layers" not in own:
        chosen["start_adapter"] = settings.adapter
    else:
        chosen |= {"rank": settings.rank, "alpha": settings.alpha}
        # Modules of one block needn't be in those that are adapted: the architecture's usual ones are.
        by_block = any("." in name for name in settings.target_modules)
        if settings.target_modules and not (by_block and "adapt_layers" in own):
            chosen["target_modules"] = settings.target_modules
    return {**chosen, **own}


def check_exports(methods: Iterable[Method], settings: CompareSettings) -> None:
    """Check the export of every method before any is begun; raises ConfigError as `prge export` does."""
    for method in methods:
        ExportConfig(out=Path(), **export_settings(method, settings))


@dataclass(frozen=True)
class Plan:
    """What one run is to do; `share` is its part of a reported run's budget."""

    steps: int
    learning_rate: float
    seed: int
    evaluate_at: tuple[int, ...] = ()
    share: float = 0.0
    with_test: bool = False

    @property
    def checkpoint_every(self) -> int:
        """A period with one checkpoint, in the second half and right before an evaluation, 0 for none.

        Its time is told as the evaluation's, so that no step seems to have taken it.
        """
        return next((step for step in self.evaluate_at if 2 * step > self.steps), 0)


def run_settings(
    method: Method, settings: CompareSettings, plan: Plan, bundle: Path, rows: Mapping[str, Path], out: Path
) -> dict[str, Any]:
    """Settings of the verb that trains a method into the folder `out`; `rows` are files by split."""
    chosen: dict[str, Any] = {
        "bundle": bundle,
        "train": rows["train"],
        "dev": rows["dev"] if plan.evaluate_at else None,
        "task": settings.task_path,
        "overflow": settings.overflow,
        "out": out,
        "steps": plan.steps,
        "optimizer": method.optimizer or settings.optimizer,
        "learning_rate": plan.learning_rate,
        "schedule": settings.schedule,
        "seed": plan.seed,
        "evaluate_every": 0,
        "evaluate_at": plan.evaluate_at,
        "select": "loss" if settings.quality == "loss" else "metric",
        "threads": settings.threads,
    }
    if method.family == "pytorch":
        return chosen | {
            "method": method.name,
            "model": settings.model_path,
            "batch_size": settings.batch_size,
            "test": rows["test"] if plan.with_test else None,
        }
    assert method.estimator is not None  # as of all that run on the engine
    return chosen | {
        "estimator": method.estimator,
        "queries": (method.directions or method.queries) if method.has_directions else None,
        "copies": method.copies,
        "batch_size": method.examples(settings.batch_size),
        "checkpoint_every": plan.checkpoint_every,
        "engine": settings.engine,
        **(method.run or {}),
    }


def test_settings(
    settings: CompareSettings, bundle: Path, rows: Path, run: Path, out: Path
) -> dict[str, Any]:
    """Settings of `prge eval` that score an engine run's result on rows, into a JSON file."""
    return {
        "bundle": bundle,
        "data": rows,
        "adapter": run,
        "json": out,
        "task": settings.task_path,
        "overflow": settings.overflow,
        "engine": settings.engine,
        "threads": settings.threads,
    }
