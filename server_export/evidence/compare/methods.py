"""The methods that can be compared, and the settings that export, train and score them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prge.errors import ConfigError
from prge.training.estimators.protocol import BACKPROPAGATION_PASSES
from prge.training.estimators.table import ESTIMATORS, EstimatorName
from server_export.evidence.baselines.methods import METHODS as PYTORCH
from server_export.evidence.baselines.methods import MethodEntry, MethodName
from server_export.evidence.compare.settings import CompareSettings


@dataclass(frozen=True)
class ComparedMethod:
    """A training method in a comparison.

    Attributes:
        name: name of the method.
        title: description for reports.
        learning_rate: centre of the search for the learning rate.
        forward_only: whether gradients come from forward passes.
        run: settings of the method itself.
        estimator: estimator of `prge run`; None for methods of `prge baseline`.
        queries: queries of a step, which share the batch: a step has batch_size / queries examples.
    """

    name: str
    title: str
    learning_rate: float
    forward_only: bool
    run: Mapping[str, Any]
    estimator: EstimatorName | None = None
    queries: int = 1

    def examples(self, batch_size: int) -> int:
        """Return the number of training examples in a step."""
        return max(1, batch_size // self.queries)

    def forward_passes(self, batch_size: int) -> int:
        """Return the forward passes of a step; a backward pass counts as two forward passes."""
        if self.estimator is not None:
            each = ESTIMATORS[self.estimator].passes(self.run.get("queries", self.queries))
        else:
            each = 2 if self.forward_only else BACKPROPAGATION_PASSES
        return each * self.examples(batch_size)


def _on_engine(
    name: str,
    estimator: EstimatorName,
    queries: int,
    title: str,
    directions: int | None = None,
) -> ComparedMethod:
    """Return a method with random directions, by default one for each query."""
    run = {"queries": directions or queries}
    return ComparedMethod(name, title, 5e-3, True, run, estimator, queries)


def _in_pytorch(name: str, entry: MethodEntry) -> ComparedMethod:
    run = {"optimizer": entry.optimizers[0]} if len(entry.optimizers) == 1 else {}
    return ComparedMethod(name, entry.title, entry.learning_rate, entry.forward_only, run)


def _in_bfloat16(name: MethodName) -> ComparedMethod:
    entry, run = PYTORCH[name], {"method": name, "dtype": "bfloat16"}
    title = f"{entry.title}, in bfloat16"
    return ComparedMethod(f"{name}-bf16", title, entry.learning_rate, entry.forward_only, run)


_DIFFERENCES = "P-RGE: differences between the losses of {} of perturbed adapters, all in one call"
_DERIVATIVES = "forward-mode differentiation: exact derivatives of the loss along {} random directions"
_ONE_SIDED = "FZOO: 7 perturbed adapters against an unperturbed one, divided by their losses' deviation"
_EXACT = "backpropagation through the same adapter, as a graph that the engine runs"

METHODS: dict[str, ComparedMethod] = {
    method.name: method
    for method in (
        _on_engine("p-rge", "antithetic", 4, _DIFFERENCES.format("4 pairs")),
        _on_engine("p-rge-q1", "antithetic", 1, _DIFFERENCES.format("a pair")),
        _on_engine("p-rge-q2", "antithetic", 2, _DIFFERENCES.format("2 pairs")),
        _on_engine("p-rge-q16", "antithetic", 16, _DIFFERENCES.format("16 pairs")),
        _on_engine("tangent", "tangent", 4, _DERIVATIVES.format(4)),
        _on_engine("tangent-q16", "tangent", 16, _DERIVATIVES.format(16)),
        # Seven perturbed copies and an unperturbed one are as many copies as p-rge has.
        _on_engine("fzoo", "fzoo", 4, _ONE_SIDED, directions=7),
        ComparedMethod("exact", _EXACT, 1e-2, False, {}, "exact"),
        *(_in_pytorch(name, entry) for name, entry in PYTORCH.items()),
        _in_bfloat16("backprop-lora-fa"),
        _in_bfloat16("backprop-lora"),
    )
}


def chosen_methods(names: Iterable[str], batch_size: int) -> list[ComparedMethod]:
    """Return the methods with the given names, in order and without duplicates.

    Raises:
        ConfigError: a name is unknown, or the queries of a method don't divide the batch.
    """
    names = list(dict.fromkeys(names))
    problems = []
    for name in names:
        if name not in METHODS:
            nearest = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.4)
            problems.append(f"{name!r} is unknown" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        elif batch_size % METHODS[name].queries:
            queries = METHODS[name].queries
            problems.append(
                f"{name}: its {queries} queries share a batch, and {batch_size} is not a multiple of them"
            )
    if problems:
        remedy = f"Methods: {', '.join(METHODS)}."
        raise ConfigError("These methods can't be compared:", problems, remedy=remedy, code="no-such-method")
    return [METHODS[name] for name in names]


def export_settings(settings: CompareSettings, out: Path) -> dict[str, Any]:
    """Return settings of `prge export` for the one bundle of all methods."""
    if settings.adapter is not None:
        adapter: dict[str, Any] = {"start_adapter": settings.adapter}
    else:
        modules = settings.target_modules or None
        adapter = {"rank": settings.rank, "lora_alpha": settings.lora_alpha, "target_modules": modules}
    return {
        "model": settings.model_path,
        "out": out,
        "quantize": settings.quantize,
        "prepend_bos": settings.prepend_bos,
        "sequence_length": settings.sequence_length,
        **adapter,
    }


@dataclass(frozen=True)
class PlannedRun:
    """The plan of one run."""

    steps: int
    learning_rate: float
    seed: int
    eval_at: tuple[int, ...] = ()
    with_test: bool = False


def run_settings(
    method: ComparedMethod,
    settings: CompareSettings,
    plan: PlannedRun,
    bundle: Path,
    rows: Mapping[str, Path],
    out: Path,
) -> dict[str, Any]:
    """Return settings of the verb that trains a method into the folder `out`; `rows` holds files by split."""
    chosen: dict[str, Any] = {
        **_shared(settings, bundle),
        "train": rows["train"],
        "dev": rows["dev"] if plan.eval_at else None,
        "out": out,
        "steps": plan.steps,
        "optimizer": settings.optimizer,
        "learning_rate": plan.learning_rate,
        "lr_scheduler_type": settings.lr_scheduler_type,
        "seed": plan.seed,
        "eval_steps": 0,
        "eval_at": plan.eval_at,
        "select": "loss",
    }
    if method.estimator is None:
        chosen |= {
            "method": method.name,
            "model": settings.model_path,
            "batch_size": settings.batch_size,
            "test": rows["test"] if plan.with_test else None,
        }
    else:
        chosen |= {
            "estimator": method.estimator,
            "batch_size": method.examples(settings.batch_size),
            "engine": settings.engine,
            # One checkpoint, in the second half and right before an evaluation: its time is counted as the
            # evaluation's and not as a step's.
            "save_steps": next((step for step in plan.eval_at if 2 * step > plan.steps), 0),
        }
    return {**chosen, **method.run}


def test_settings(
    settings: CompareSettings, bundle: Path, rows: Path, run: Path, out: Path
) -> dict[str, Any]:
    """Return settings of `prge eval` that score an engine run's result on rows into a JSON file."""
    own = {"data": rows, "adapter": run, "json": out, "engine": settings.engine}
    return {**_shared(settings, bundle), **own}


def _shared(settings: CompareSettings, bundle: Path) -> dict[str, Any]:
    return {
        "bundle": bundle,
        "task": settings.task_path,
        "date": settings.date,
        "overflow": settings.overflow,
        "append_eos": settings.append_eos,
        "control_tokens": settings.control_tokens,
        "threads": settings.threads,
    }
