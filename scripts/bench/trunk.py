"""Time of a training step above a cached trunk against one of the program with adapters in all blocks.

    python scripts/bench/trunk.py --model smollm2-135m --adapt-layers top:4 --queries 4 --json out.json

Two programs of the same random model: one with adapters everywhere, and one with adapters in the top blocks,
cut into trunk and step. The first epoch fills the cache. In the second one every step is timed beside a step
of the other program on the same rows, in one process; figures are medians of the ratios. Prints JSON:
`cached_over_full` of the second epoch, `first_epoch_over_full`, what the host takes of a cached step, and how
far the scalars of cached steps are from those of steps whose trunk was computed anew.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from random_model import random_model
from reports import report_schemes

from device_runner.engines.executorch_engine import ExecutorchEngine
from device_runner.engines.trunk_cache import TrunkCache
from device_runner.engines.trunk_engine import TrunkEngine
from prge.adapter import Adapter
from prge.bundle import STEP_METHOD, TRUNK_METHOD, UPPER_METHOD, Bundle
from prge.contract import Contract
from prge.differences import Antithetic, Differences
from prge.engine import Engine
from prge.estimators import Estimator, Step
from prge.examples import Batch, Example, Slot, TokenSequence, make_batch
from prge.optimizers import Adam
from prge.tangents import Tangents
from server_export.model.random_models import CONFIGURATIONS


def export_program(arguments: argparse.Namespace, scheme: str, folder: Path, cut: bool) -> Bundle:
    """Write a program without its method for scoring, and describe it."""
    from server_export.lower.lowering import lower
    from server_export.lower.method_graphs import cut_of, export_programs
    from server_export.model.program import build_program
    from server_export.settings import ExportConfig

    folder.mkdir(parents=True)
    config = ExportConfig(
        model=arguments.model,
        out=folder,
        target_modules=arguments.target_modules,
        adapt_layers=arguments.adapt_layers if cut else None,
        trunk_cache=cut,
        rank=arguments.rank,
        estimator=arguments.estimator,
        queries=arguments.queries,
        batch_size=arguments.batch_size,
        sequence_length=arguments.seq_len,
        positions=arguments.positions,
        quantize=scheme,
    )
    built = build_program(config, random_model(arguments.model, arguments.layers))
    built = replace(built, score_contract=None)
    programs = export_programs(built)
    (folder / "program.pte").write_bytes(lower(programs).buffer)
    if not cut:
        return Bundle(folder, built.contract, {})
    trunk, contract = built.contract.divided(cut_of(programs, built))
    return Bundle(folder, contract, {}, trunk=trunk)


def load(bundle: Bundle, method: str) -> ExecutorchEngine:
    """One method of a program of this script."""
    return ExecutorchEngine.load(bundle, check=False, method=method)


def make_batches(contract: Contract, count: int) -> list[Batch]:
    """Batches of random rows, every row another one."""
    random = np.random.default_rng(0)
    length, slots = contract.sequence_length, contract.positions
    at = length - 1 - slots
    batches = []
    for _ in range(count):
        rows = random.integers(0, contract.vocabulary_size, (contract.batch_size, length)).tolist()
        examples = [
            Example(
                number,
                (
                    TokenSequence(
                        tuple(row), tuple(Slot(at + k, row[at + k + 1], 1 / slots, 0) for k in range(slots))
                    ),
                ),
                1,
                None,
            )
            for number, row in enumerate(rows, 1)
        ]
        batches.append(make_batch(examples, contract))
    return batches


@dataclass(frozen=True)
class Timing:
    """Seconds of one step, those of them in the engine and its cache, and the step's scalars."""

    seconds: float
    engine_seconds: float
    scalars: np.ndarray[Any, Any]


class TimedStep:
    """Training steps on one engine."""

    def __init__(self, engine: Engine, queries: int) -> None:
        self.engine = engine
        self.estimator: Estimator = (
            Tangents() if engine.contract.is_tangent else Differences(Antithetic(queries, 1e-2))
        )
        self.adapter = Adapter.zeros(engine.contract.modules)
        self.adapter.values[:] = np.random.default_rng(1).normal(size=self.adapter.size) * 0.01
        self.optimizer = Adam(self.adapter.size)

    def __call__(self, batch: Batch) -> Timing:
        """One step; a rate of zero keeps the adapter, so that epochs can be compared."""
        start = time.perf_counter()
        found = self.estimator.measure(self.engine, Step(self.adapter, [batch], 0, 0))
        gradient = self.estimator.gradient(found.learnt, 0, 0, self.adapter.modules)
        self.optimizer.update(self.adapter.values, gradient, 0.0)
        return Timing(time.perf_counter() - start, found.engine_seconds, found.scalars)


def bench(arguments: argparse.Namespace, scheme: str, folder: Path) -> dict[str, Any]:
    """Export, interleave and measure one quantization scheme."""
    start = time.perf_counter()
    full_bundle = export_program(arguments, scheme, folder / "full", cut=False)
    cut_bundle = export_program(arguments, scheme, folder / "cut", cut=True)
    export_seconds = time.perf_counter() - start
    trunk, upper = load(cut_bundle, TRUNK_METHOD), load(cut_bundle, UPPER_METHOD)
    cache = TrunkCache(folder / "cache", arguments.cache_bytes)
    engine = TrunkEngine([trunk], [upper], "bench", cache)
    full = TimedStep(load(full_bundle, STEP_METHOD), arguments.queries)
    cached, anew = (
        TimedStep(engine, arguments.queries),
        TimedStep(TrunkEngine([trunk], [upper], "bench"), arguments.queries),
    )
    batches = make_batches(full.engine.contract, arguments.repeats + 1)
    # The first batch warms caches up: its pair isn't counted.
    first = [(cached(batch), full(batch)) for batch in batches][1:]
    computed = engine.computed
    second = [(cached(batch), full(batch)) for batch in batches][1:]
    differences = [
        float(np.abs(ours.scalars - anew(batch).scalars).max())
        for (ours, _), batch in zip(second[:3], batches[1:], strict=False)
    ]
    median = statistics.median
    return {
        "cached_over_full": median(ours.seconds / theirs.seconds for ours, theirs in second),
        "first_epoch_over_full": median(ours.seconds / theirs.seconds for ours, theirs in first),
        "cached_step_seconds": median(ours.seconds for ours, _ in second),
        "full_step_seconds": median(theirs.seconds for _, theirs in second),
        "cached_host_share": median(1 - ours.engine_seconds / ours.seconds for ours, _ in second),
        "largest_scalar_difference": max(differences),
        "rows_computed_in_second_epoch": engine.computed - computed,
        "cache_bytes_per_row": cache.bytes_kept // max(len(cache), 1),
        "crossing": [list(spec.shape) for spec in trunk.contract.cut],
        "adapted_modules": {"full": len(full.adapter.modules), "cut": len(cached.adapter.modules)},
        "export_seconds": export_seconds,
        "repeats": len(second),
    }


def main() -> None:
    """Read the flags, run, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(CONFIGURATIONS), default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="make the model shallower")
    parser.add_argument("--adapt-layers", default="top:4")
    parser.add_argument("--estimator", choices=("antithetic", "tangent"), default="antithetic")
    parser.add_argument("--quantize", nargs="+", default=["fp32"])
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--positions", type=int, default=1)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--target-modules", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cache-bytes", type=int, default=1 << 30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report_schemes(arguments, bench)


if __name__ == "__main__":
    main()
