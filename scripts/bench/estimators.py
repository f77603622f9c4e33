"""Exact tangents against finite differences, in the engine: how true their scalars are and what they cost.

    python scripts/bench/estimators.py --model smollm2-135m --quantize 8da4w --queries 4 --json out.json

Truth is the derivative of the loss in float64 along the same directions, with the same quantized weights and
activations that are not rounded; `cos_` keys are cosines between all scalars of an estimator and the true
ones. Times are medians of interleaved pairs of calls in one process: a tangent program against the stack
program of 2 x queries copies. The model is an architecture with random weights, scaled so that logits and
attention vary as trained ones do, or a folder of a trained model. Prints JSON: the first scheme's keys at the
top.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eager_engine import EagerEngine
from random_model import random_model
from reports import report_schemes

from device_runner.engines.executorch_engine import ExecutorchEngine
from prge.adapter import Adapter
from prge.bundle import Bundle
from prge.contract import Contract
from prge.differences import Antithetic
from prge.directions import RankOneDirections
from prge.engine import Array, Engine
from prge.examples import Batch, Example, Slot, TokenSequence, make_batch
from prge.objectives import losses, score_gradient, score_slopes, scores
from server_export.lower.lowering import lower
from server_export.lower.method_graphs import export_programs
from server_export.model.loading import load_model
from server_export.model.program import STEP_METHOD, BuiltProgram, build_program
from server_export.model.quantization import dequantize
from server_export.model.random_models import CONFIGURATIONS
from server_export.settings import ExportConfig

ADAPTER_SIZE = 0.01


def build(
    arguments: argparse.Namespace, scheme: str, estimator: str, queries: int, layers: int | None
) -> Any:
    """A program of the asked kind before it is traced."""
    if arguments.model in CONFIGURATIONS:
        loaded = random_model(arguments.model, layers or arguments.layers, scaled=True)
    else:
        loaded = load_model(arguments.model, pooled=False, revision=None)
    config = ExportConfig(
        model=arguments.model,
        out=Path("unused"),
        estimator=estimator,  # type: ignore[arg-type]
        target_modules=arguments.target_modules,
        rank=arguments.rank,
        queries=queries,
        batch_size=arguments.batch_size,
        sequence_length=arguments.seq_len,
        positions=arguments.positions,
        quantize=scheme,
    )
    return build_program(config, loaded)


def engine(built: BuiltProgram, folder: Path, score: bool = True) -> tuple[ExecutorchEngine, dict[str, Any]]:
    """Lower a program and load its training method; returns what the export took too."""
    start = time.perf_counter()
    programs = export_programs(built if score else replace(built, score_contract=None))
    traced = time.perf_counter()
    lowered = lower(programs)
    seconds = {"tracing": traced - start, "lowering": time.perf_counter() - traced}
    report = lowered.reports[STEP_METHOD]
    folder.mkdir(parents=True)
    bundle = Bundle(folder, built.contract, {})
    bundle.program.write_bytes(lowered.buffer)
    del lowered, programs
    facts = {"export_seconds": seconds, "delegates": report.delegates, "outside": report.outside}
    facts["delegated_share"] = report.delegated_share
    return ExecutorchEngine.load(bundle, check=False), facts


def random_rows(contract: Contract, count: int) -> list[Batch]:
    """Batches of random tokens; a row is read at its last positions."""
    random = np.random.default_rng(0)
    first = contract.sequence_length - 1 - contract.positions
    batches = []
    for _ in range(count):
        table = random.integers(
            0, contract.vocabulary_size, (contract.batch_size, contract.sequence_length)
        ).tolist()
        examples = []
        for number, row in enumerate(table, 1):
            slots = tuple(
                Slot(first + k, row[first + k + 1], 1 / contract.positions, 0)
                for k in range(contract.positions)
            )
            examples.append(Example(number, (TokenSequence(tuple(row), slots),), 1, None))
        batches.append(make_batch(examples, contract))
    return batches


class Directions:
    """The directions of one batch: one of rank one per query, the same for all rows."""

    def __init__(self, contract: Contract, queries: int, number: int, rows: int) -> None:
        self.contract, self.queries = contract, queries
        self.rank_one = RankOneDirections(7, number, queries, rows, contract.modules, shared=True)
        self.rows = rows

    def factors(self) -> dict[str, Array]:
        """Program inputs `u.<module>` and `v.<module>`."""
        inputs: dict[str, Array] = {}
        for module in self.contract.modules:
            inputs[f"u.{module.name}"] = np.zeros((self.queries, self.rows, module.rank), np.float32)
            inputs[f"v.{module.name}"] = np.zeros((self.queries, self.rows, module.out_features), np.float32)
        self.rank_one.fill(inputs, np.arange(self.rows))
        return inputs

    def values(self, query: int) -> dict[str, Array]:
        """The direction of one query by module, f32 [rank, out]."""
        inputs = self.factors()
        return {
            module.name: np.outer(inputs[f"u.{module.name}"][query, 0], inputs[f"v.{module.name}"][query, 0])
            for module in self.contract.modules
        }


def tangent_scalars(program: Engine, adapter: Adapter, batches: Sequence[Batch], queries: int) -> list[float]:
    """Derivatives of every batch's mean loss, query by query, from a tangent program."""
    found: list[float] = []
    contract = program.contract
    lora_b = {f"lora_b.{name}": view for name, view in adapter.named().items()}
    for number, batch in enumerate(batches):
        directions = Directions(contract, queries, number, contract.rows)
        outputs = program.forward({**batch.inputs(1, False), **lora_b, **directions.factors()})
        by_score = score_gradient(scores(batch, outputs, 1), batch.labels)
        slopes = score_slopes(batch, outputs)
        found += (by_score * slopes).sum(-1).mean(-1).tolist()
    return found


def difference_scalars(
    program: Engine, adapter: Adapter, batches: Sequence[Batch], queries: int, epsilon: float
) -> list[float]:
    """The same from central differences on a P-RGE program of 2 x queries copies."""
    found: list[float] = []
    contract = program.contract
    rule = Antithetic(queries, epsilon)
    for number, batch in enumerate(batches):
        directions = Directions(contract, queries, number, 1)
        stack = {module.name: [] for module in contract.modules}  # type: dict[str, list[Array]]
        for variant in rule.variants():
            moved = directions.values(variant.query)
            for name, view in adapter.named().items():
                stack[name].append(view + np.float32(variant.scale) * moved[name])
        lora_b = {f"lora_b.{name}": np.stack(views).astype(np.float32) for name, views in stack.items()}
        outputs = program.forward({**batch.inputs(contract.copies, False), **lora_b})
        table = losses(scores(batch, outputs, contract.copies), batch.labels)
        found += rule.scalars(table.mean(-1)).tolist()
    return found


def true_scalars(
    built: BuiltProgram, adapter: Adapter, batches: Sequence[Batch], queries: int
) -> list[float]:
    """The same by PyTorch in float64; the program's module is converted in place."""
    dequantize(built.module)
    exact = EagerEngine(built.module, built.contract, torch.float64)
    return tangent_scalars(exact, adapter, batches, queries)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Cosine of the angle between two vectors."""
    left, right = np.array(first), np.array(second)
    return float(left @ right / np.sqrt((left @ left) * (right @ right)))


def inputs_of(program: Engine, adapter: Adapter, batch: Batch) -> dict[str, Array]:
    """Inputs of one call, for timing."""
    contract = program.contract
    inputs = batch.inputs(contract.copies, False)
    if contract.is_tangent:
        lora_b = {f"lora_b.{name}": view for name, view in adapter.named().items()}
        return {**inputs, **lora_b, **Directions(contract, contract.queries, 0, contract.rows).factors()}
    views = adapter.named().items()
    return {**inputs, **{f"lora_b.{name}": np.stack([view] * contract.copies) for name, view in views}}


def interleaved(engines: Sequence[Engine], adapter: Adapter, batch: Batch, repeats: int) -> list[list[float]]:
    """Seconds of every call, one list per engine; the first round warms caches and is left out."""
    calls = [(program, inputs_of(program, adapter, batch)) for program in engines]
    rounds = []
    for _ in range(repeats + 1):
        seconds = []
        for program, inputs in calls:
            start = time.perf_counter()
            program.forward(inputs)
            seconds.append(time.perf_counter() - start)
        rounds.append(seconds)
    return [list(column) for column in zip(*rounds[1:], strict=True)]


def timing(engines: Sequence[Engine], adapter: Adapter, batch: Batch, queries: int, repeats: int) -> Any:
    """Median seconds of a stack and a tangent call, and the median of their ratio."""
    stack, tangent = interleaved(engines, adapter, batch, repeats)
    return {
        "stack_seconds": statistics.median(stack),
        "tangent_seconds": statistics.median(tangent),
        "time_tangent_over_stack": statistics.median(t / s for s, t in zip(stack, tangent, strict=True)),
        "rows_ratio": (1 + queries) / (2 * queries),
    }


def bench(arguments: argparse.Namespace, scheme: str, folder: Path) -> dict[str, Any]:
    """Everything about one scheme."""
    queries = arguments.queries
    built = build(arguments, scheme, "antithetic", queries, None)
    stack, stack_facts = engine(built, folder / "stack")
    built = build(arguments, scheme, "tangent", queries, None)
    tangent, tangent_facts = engine(built, folder / "tangent")
    adapter = Adapter.zeros(built.contract.modules)
    adapter.values[:] = np.random.default_rng(1).normal(size=adapter.size) * ADAPTER_SIZE
    batches = random_rows(built.contract, arguments.batches)
    times = timing([stack, tangent], adapter, batches[0], queries, arguments.repeats)
    estimates = {
        "cos_tangent": tangent_scalars(tangent, adapter, batches, queries),
        **{
            str(epsilon): difference_scalars(stack, adapter, batches, queries, epsilon)
            for epsilon in arguments.epsilons
        },
    }
    del stack, tangent
    truth = true_scalars(built, adapter, batches, queries)
    cosines = {name: cosine(values, truth) for name, values in estimates.items()}
    result = {
        "cos_tangent": cosines.pop("cos_tangent"),
        "cos_antithetic": cosines,
        **times,
        "scalars": len(truth),
        "stack": stack_facts,
        "tangent": tangent_facts,
    }
    result["other_queries"] = {}
    for count in arguments.other_queries:
        pair = []
        for estimator in ("antithetic", "tangent"):
            shallow = build(arguments, scheme, estimator, count, arguments.other_layers)
            pair.append(engine(shallow, folder / f"{estimator}-{count}", score=False)[0])
        shallow_adapter = Adapter.zeros(shallow.contract.modules)
        batch = random_rows(shallow.contract, 1)[0]
        result["other_queries"][str(count)] = timing(pair, shallow_adapter, batch, count, arguments.repeats)
        del pair
    return result


def main() -> None:
    """Read the flags, run, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="an architecture's name, or a folder")
    parser.add_argument("--layers", type=int, help="make an architecture shallower")
    parser.add_argument("--quantize", nargs="+", default=["8da4w", "fp32"])
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--other-queries", type=int, nargs="*", default=[1, 2, 8, 16])
    parser.add_argument("--other-layers", type=int, help="make the model of other queries shallower")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--positions", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--target-modules", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1])
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report_schemes(arguments, bench)


if __name__ == "__main__":
    main()
