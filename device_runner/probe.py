"""`prge probe`: how much of what differences measure at an epsilon is signal, on real rows.

Their reference is the exact derivative along the same direction, of every batch and query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from device_runner.engines.opening import Engines, open_engines
from device_runner.session.memory import budget_of_steps, watched_memory
from device_runner.session.noise import LEAST_NOISE, Agreement, compare, slopes
from device_runner.session.planning import default_batch
from device_runner.session.settings import EngineFlags
from device_runner.session.speaking import note
from prge.engine import Engine, Float64Array
from prge.errors import ConfigError, EngineError
from prge.files.adapter import Adapter
from prge.files.bundle import open_bundle
from prge.files.peft import find_adapter, read_compatible_adapter
from prge.files.run_folder import write_json
from prge.files.signatures import STACK, TANGENT
from prge.learning.encoder_heads import fit_heads
from prge.learning.estimators.differences import Variant, perturbed
from prge.learning.estimators.directions import RankOneDirections
from prge.learning.estimators.protocol import Step
from prge.learning.estimators.table import DEFAULT_QUERIES
from prge.learning.estimators.tangents import Tangents
from prge.learning.evaluation import score
from prge.learning.head import Head
from prge.learning.sampling import Sampler, most_sequences
from prge.rows.example_building import BuildOptions, load_examples
from prge.rows.own_heads import head_of, task_of
from prge.rows.sources import read_source
from prge.rows.tokenizer import bundle_tokenizer
from prge.running.training_flags import ExampleFlags, OverflowFlags, SelectionFlags
from prge.verbs.bounds import bound_problems
from prge.verbs.kinds import Paths
from prge.verbs.outputs import OutputFile
from prge.verbs.settings import parse_settings


@dataclass(frozen=True)
class ProbeSettings(EngineFlags, OverflowFlags, SelectionFlags, ExampleFlags):
    """Measure on real rows how much signal each estimator and epsilon has, and recommend one."""

    bundle: Path
    """Folder that `prge export` wrote."""
    data: Paths
    """Rows to measure on: jsonl, json, csv, tsv or parquet, several files one after another; a folder with a
    file train; or the name of a data set of the hub."""
    adapter: Path | None = None
    """Run, checkpoint or PEFT folder to measure at; default: the adapter that the bundle came with. An
    encoder's head comes from it too, and is fitted on the rows where it has none."""
    queries: int | None = None
    """Random directions a step; default: 4."""
    batch_size: int | None = None
    """Examples of a batch. Default: as many as have 4 sequences together, at least 1."""
    batches: int = 4
    """Batches to measure, each along every query's direction."""
    epsilons: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    """Lengths of a perturbation to try, in units of the adapter's values."""
    seed: int = 42
    """Seed of directions and row order."""
    json: OutputFile | None = None
    """File to write the result to as JSON."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        if not self.epsilons:
            problems.append("--epsilons is empty, give at least one")
        if problems:
            raise ConfigError(
                "these settings can't be used:", problems, remedy="`prge probe --help` explains them"
            )


@dataclass(frozen=True)
class Reading:
    """Differences at one epsilon: how they agree with exact derivatives, and what a scalar costs in rows."""

    estimator: str
    epsilon: float
    agreement: Agreement
    rows_per_scalar: float

    def to_json(self) -> dict[str, Any]:
        """As JSON's own types."""
        return {
            "estimator": self.estimator,
            "epsilon": self.epsilon,
            "r": self.agreement.r,
            "slope": self.agreement.slope,
            "signal_to_noise": self.agreement.signal_to_noise,
            "rows_per_scalar": self.rows_per_scalar,
        }


@dataclass(frozen=True)
class Report:
    """What a probe found; `quantization` is None for float32 weights and activations."""

    quantization: str | None
    batches: int
    examples: int
    queries: int
    readings: tuple[Reading, ...]
    tangent_rows_per_scalar: float

    @property
    def best(self) -> Reading:
        """The reading with the largest signal to noise; of equal ones the first."""
        return max(self.readings, key=lambda reading: reading.agreement.r)

    def recommendation(self) -> str:
        """Which estimator to take, and which epsilon."""
        best, agreement = self.best, self.best.agreement
        return (
            "Take the tangents: they are exact and need no epsilon. Of the differences, "
            f"{best.estimator} at epsilon {best.epsilon:g} has the most signal: signal to noise "
            f"{_signal_text(agreement)}, r {agreement.r:.3f}."
        )

    def to_json(self) -> dict[str, Any]:
        """The report as JSON's own types."""
        return {
            "quantization": self.quantization,
            "batches": self.batches,
            "examples": self.examples,
            "queries": self.queries,
            "tangent_rows_per_scalar": self.tangent_rows_per_scalar,
            "readings": [reading.to_json() for reading in self.readings],
            "best": self.best.to_json(),
            "recommendation": self.recommendation(),
        }

    def text(self) -> str:
        """The table with what it means, and the recommendation."""
        lines = [
            f"{self.batches} batches of {self.examples // self.batches} examples, {self.queries} queries: "
            f"{self.batches * self.queries} scalars",
            "r and slope: of differences with the exact derivatives along the same directions, which are "
            "products u v^T;",
            "the directions of copies have independent signs",
        ]
        rows = [
            ["estimator", "epsilon", "r", "slope", "signal/noise", "rows/scalar"],
            ["tangent", "-", "exact", "-", "-", f"{self.tangent_rows_per_scalar:.3g}"],
        ]
        for each in self.readings:
            figures = [f"{each.epsilon:g}", f"{each.agreement.r:.3f}", f"{each.agreement.slope:.3f}"]
            rows.append(
                [each.estimator, *figures, _signal_text(each.agreement), f"{each.rows_per_scalar:.3g}"]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(
                [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]
        return "\n".join([*lines, "", *table, "", self.recommendation()])


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge probe --help`."""
    settings = parse_settings(ProbeSettings, argv, "prge probe", ["bundle"])
    with watched_memory(settings.memory, note):
        report = probe(settings)
    print(report.text())
    if settings.json:
        write_json(settings.json, report.to_json())
    return 0


def probe(settings: ProbeSettings) -> Report:
    """Measure every estimator and epsilon of the settings.

    Raises:
        PrgeError: bad input, or derivatives that are not finite.
    """
    bundle = open_bundle(settings.bundle)
    if TANGENT not in bundle.chain.roles:
        raise ConfigError(
            "the settings don't fit the bundle:",
            [f"it has the roles {', '.join(bundle.chain.roles)}, and no exact derivatives to compare with"],
            remedy="export with the role tangent",
        )
    queries = settings.queries or DEFAULT_QUERIES
    if settings.batches * queries < 2:
        raise ConfigError(
            "one scalar can't be correlated:",
            [f"--batches is {settings.batches}, of {queries} query"],
            remedy="give --batches 16",
        )
    tokenizer = bundle_tokenizer(bundle)
    task = task_of(bundle, settings.task)
    options = BuildOptions(
        settings.overflow,
        settings.append_eos,
        control_tokens=settings.control_tokens,
        date=settings.date,
    )
    source = read_source(settings.data, "train", settings.columns, task=task)
    examples, data = load_examples(source, tokenizer, bundle.chain.scoring, task, settings.selection, options)
    rows = (settings.batch_size or default_batch(examples)) * most_sequences(examples)
    contract = bundle.chain.contract(TANGENT, rows, queries=queries)
    start = find_adapter(settings.adapter) if settings.adapter else bundle.adapter
    adapter = read_compatible_adapter(start, contract.modules, bundle.adapter)
    sampler = Sampler(examples, contract, settings.seed, pad=tokenizer.pad_id)
    print(data.text())
    budget = budget_of_steps(bundle, contract, examples, settings.memory, settings.engine, "this probe")
    loaded, scoring = None, None
    if budget is not None:
        loaded, scoring = budget.loaded, bundle.chain.contract(STACK, contract.rows)
    programs = open_engines(bundle, contract, settings.threads, settings.engine, loaded, scoring)
    head = None
    if contract.is_encoder:
        head = head_of(bundle, start, task, examples[0].candidates)
        head = head or fit_heads(programs.score, adapter, examples, tokenizer.pad_id).head
    return Report(
        bundle.quantization,
        settings.batches,
        settings.batches * sampler.per_step,
        queries,
        tuple(_readings(programs, adapter, sampler, settings, head)),
        contract.computed_rows / queries,
    )


def _signal_text(agreement: Agreement) -> str:
    ratio = agreement.signal_to_noise
    return f"{ratio:.3g}" if ratio < 0.99 / LEAST_NOISE else f">{0.99 / LEAST_NOISE:.0g}"


def _readings(
    programs: Engines, adapter: Adapter, sampler: Sampler, settings: ProbeSettings, head: Head | None
) -> list[Reading]:
    """A reading for every estimator and epsilon.

    As many batches share their directions as the program for scoring takes in one call.
    """
    contract, scoring = programs.step.contract, programs.score.contract
    together = max(scoring.rows // contract.batch_size, 1)
    numbers = range(settings.batches)
    groups = [numbers[start : start + together] for start in numbers[::together]]
    # All tangents before all scores: either role is loaded once.
    exact = np.concatenate(
        [_tangents(programs.step, adapter, sampler, group, settings.seed, head) for group in groups], -1
    )
    if not np.isfinite(exact).all():
        raise EngineError(
            "the program's derivatives are not finite at this adapter",
            remedy="give another --adapter; without one, the one that the bundle came with is measured",
        )
    rules = {
        (name, epsilon): rule
        for epsilon in settings.epsilons
        for name, rule in slopes(contract.queries, epsilon).items()
    }
    variants = {variant for rule in rules.values() for variant in rule.variants()}
    losses = [
        _losses(programs.score, adapter, sampler, group, settings.seed, variants, head) for group in groups
    ]
    readings = []
    for (name, epsilon), rule in sorted(rules.items(), key=lambda item: item[0][0]):
        needed = rule.variants()
        parts = [rule.scalars(np.stack([table[variant] for variant in needed])) for table in losses]
        rows = len(needed) * contract.batch_size / contract.queries
        readings.append(Reading(name, epsilon, compare(np.concatenate(parts, -1), exact), rows))
    return readings


def _tangents(
    engine: Engine, adapter: Adapter, sampler: Sampler, group: range, seed: int, head: Head | None
) -> Float64Array:
    """Exact derivatives of the mean losses of some batches, f64 [queries, batches]."""
    batches = [batch for step in group for batch in sampler.batches(step)]
    measured = Tangents(shared=True).measure(engine, Step(adapter, batches, seed, group.start, head))
    return measured.scalars.reshape(engine.contract.queries, len(group), -1).mean(-1)


def _losses(
    engine: Engine,
    adapter: Adapter,
    sampler: Sampler,
    group: range,
    seed: int,
    variants: set[Variant],
    head: Head | None,
) -> dict[Variant, Float64Array]:
    """Mean losses of some batches under every variant, f64 [batches]."""
    examples = [example for step in group for example in sampler.chosen(step)]
    queries = sampler.contract.queries
    directions = RankOneDirections(seed, group.start, queries, 1, adapter.modules, shared=True)
    losses_by_variant = {}
    for variant in variants:
        moved = Adapter(adapter.modules, perturbed(adapter, variant, directions))
        scored = score(engine, moved, examples, head, sampler.pad)
        losses_by_variant[variant] = scored.losses.reshape(len(group), -1).mean(-1)
    return losses_by_variant
