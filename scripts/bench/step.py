"""Time of a training step on the engine: against one copy at a time, and against its matrix products alone.

    python scripts/bench/step.py --model smollm2-135m --queries 4 --batch-size 2 --seq-len 64 --json out.json

The programs have the same random weights and run the same step (antithetic, the same directions and rows;
the tangent program, the same rows), interleaved in one process; figures are medians. The `limit` of a program
is one with the same matrix products on the same rows and nothing else. A second process runs the parallel
program alone for its peak memory. Prints JSON: the keys of the first scheme at the top, every scheme under
`schemes`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from random_model import random_model
from reports import report_schemes

from device_runner.engines.executorch_engine import ExecutorchEngine
from prge.adapter import Adapter
from prge.bundle import Bundle
from prge.contract import Contract
from prge.differences import Antithetic, Differences
from prge.engine import Engine
from prge.estimators import Estimator, Step
from prge.examples import Example, Slot, TokenSequence, make_batch
from prge.memory import PeakMemory
from prge.optimizers import Adam
from prge.tangents import Tangents
from server_export.model.random_models import CONFIGURATIONS

if TYPE_CHECKING:  # a process that runs a program alone imports no exporter
    from roofline import Cost, LargestLayer, ProductProgram

# What bench() exports: the copies of a P-RGE program, or a tangent program.
TANGENT = 0


@dataclass(frozen=True)
class Exported:
    """An exported program: where it is, what became of it, its matrix products as a program of their own."""

    folder: Path
    report: dict[str, Any]
    products: list[Cost]
    largest_layer: LargestLayer
    limit: ProductProgram

    def step(self, queries: int) -> TimedStep:
        """One training step on this program."""
        return TimedStep(load(self.folder), queries)


def export_program(arguments: argparse.Namespace, scheme: str, copies: int, folder: Path) -> Exported:
    """Write `program.pte` and its contract, and its matrix products' programs."""
    from limit import matrix_products
    from roofline import Cost, LargestLayer, ProductProgram

    from server_export.lower.lowering import lower
    from server_export.lower.method_graphs import export_programs
    from server_export.model.program import STEP_METHOD, build_program
    from server_export.settings import ExportConfig

    is_tangent = copies == TANGENT
    folder.mkdir(parents=True)
    config = ExportConfig(
        model=arguments.model,
        out=folder,
        target_modules=arguments.target_modules,
        rank=arguments.rank,
        estimator="tangent" if is_tangent else "antithetic",
        queries=arguments.queries,
        copies=None if is_tangent else copies,
        batch_size=arguments.batch_size,
        sequence_length=arguments.seq_len,
        positions=arguments.positions,
        quantize=scheme,
    )
    built = build_program(config, random_model(arguments.model, arguments.layers))
    # The method that scores rows is no part of a step.
    programs = export_programs(replace(built, score_contract=None))
    lowered = lower(programs)
    lowered.write(folder / "program.pte")
    (folder / "contract.json").write_text(json.dumps(built.contract.to_json()))
    report = lowered.reports[STEP_METHOD].to_json()
    del lowered
    limit, inputs, products = matrix_products(programs[STEP_METHOD])
    return Exported(
        folder,
        report,
        [Cost(product.operations, product.weight_bytes) for product in products],
        LargestLayer.of(programs[STEP_METHOD], folder),
        ProductProgram.write(limit, inputs, folder / "limit.pte"),
    )


def export_in_child(arguments: argparse.Namespace, scheme: str, copies: int, folder: Path) -> Exported:
    """The same in a process of its own, whose memory is free again when it ends."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(export_program, arguments, scheme, copies, folder).result()


def load(folder: Path) -> ExecutorchEngine:
    """Load a program that this script wrote."""
    contract = Contract.from_json(json.loads((folder / "contract.json").read_text()))
    return ExecutorchEngine.load(Bundle(folder, contract, {}), check=False)


class TimedStep:
    """One training step on one engine."""

    def __init__(self, engine: Engine, queries: int) -> None:
        contract = engine.contract
        random = np.random.default_rng(0)
        self.engine = engine
        self.estimator: Estimator = Differences(Antithetic(queries, 1e-2))
        if contract.is_tangent:
            self.estimator = Tangents()
        self.adapter = Adapter.zeros(contract.modules)
        self.adapter.values[:] = random.normal(size=self.adapter.size) * 0.01
        self.optimizer = Adam(self.adapter.size)
        rows = random.integers(0, contract.vocabulary_size, (contract.batch_size, contract.sequence_length))
        at = contract.sequence_length - 1 - contract.positions
        self.batch = make_batch(
            [
                Example(
                    number,
                    (
                        TokenSequence(
                            tuple(row),
                            tuple(
                                Slot(at + k, int(row[at + k + 1]), 1 / contract.positions, 0)
                                for k in range(contract.positions)
                            ),
                        ),
                    ),
                    1,
                    None,
                )
                for number, row in enumerate(rows.tolist(), 1)
            ],
            contract,
        )

    def __call__(self) -> tuple[float, float, list[float]]:
        """Seconds of the step, seconds in the engine, the scalars."""
        start = time.perf_counter()
        found = self.estimator.measure(self.engine, Step(self.adapter, [self.batch], 0, 0))
        gradient = self.estimator.gradient(found.learnt, 0, 0, self.adapter.modules)
        # A rate of zero keeps both programs on the same values, so that their scalars can be compared.
        self.optimizer.update(self.adapter.values, gradient, 0.0)
        return time.perf_counter() - start, found.engine_seconds, found.scalars.ravel().tolist()


def run_alone(folder: Path, queries: int, steps: int) -> None:
    """Run one program in a process of its own and print its figures."""
    memory = PeakMemory()
    idle = memory.report()["peak_bytes"]
    ExecutorchEngine.set_threads(None)  # imports the runtime
    runtime = memory.report()["peak_bytes"]
    step = TimedStep(load(folder), queries)
    timings = [step()[:2] for _ in range(steps)]
    print(
        json.dumps(
            {"idle": idle, "runtime": runtime, "peak": memory.report()["peak_bytes"], "timings": timings}
        )
    )


def bench(arguments: argparse.Namespace, scheme: str, folder: Path) -> dict[str, Any]:
    """Export, interleave and measure one quantization scheme."""
    from roofline import least_seconds, memory_bandwidth, possible_speedup, product_rates

    copies = 2 * arguments.queries
    start = time.perf_counter()
    parallel = export_in_child(arguments, scheme, copies, folder / "parallel")
    export_seconds = time.perf_counter() - start
    sequential = export_in_child(arguments, scheme, 1, folder / "sequential")
    tangent = None
    if not arguments.no_tangent:
        tangent = export_in_child(arguments, scheme, TANGENT, folder / "tangent")
    one_copy = least_time(sequential.limit, arguments.repeats)
    rounds, difference = measure(parallel, sequential, tangent, arguments.queries, arguments.repeats)
    alone = run_in_child(parallel.folder, arguments.queries)
    bandwidth = memory_bandwidth(ExecutorchEngine.set_threads(None))
    rates = product_rates([sequential.largest_layer, parallel.largest_layer])
    one, together = (
        least_seconds(program.products, rate, bandwidth)
        for program, rate in zip((sequential, parallel), rates, strict=True)
    )
    # What one copy's products take beyond what they need: reading weights while nothing is computed,
    # products too small for the rate of the largest, starting each of them.
    call_seconds = one_copy - one

    def median(value: Callable[[Round], float]) -> float:
        return statistics.median(map(value, rounds))

    report = parallel.report
    figures = {
        "stack_over_limit": median(lambda seen: seen.parallel[1] / seen.limit),
        "parallel_speedup": median(lambda seen: seen.sequential[0] / seen.parallel[0]),
        "parallel_speedup_possible": possible_speedup(copies, one, together, call_seconds),
        "host_share": median(lambda seen: 1 - seen.parallel[1] / seen.parallel[0]),
        "peak_rss_over_weights": (alone["peak"] - alone["runtime"]) / report["constant_bytes"],
        "engine_seconds": median(lambda seen: seen.parallel[1]),
        "call_seconds": call_seconds,
        "limit_seconds": median(lambda seen: seen.limit),
        "host_seconds": median(lambda seen: seen.parallel[0] - seen.parallel[1]),
        "sequential_engine_seconds": median(lambda seen: seen.sequential[1]),
        "largest_scalar_difference": difference,
        "delegated_share": report["delegated_share"],
        "delegated_products": report["delegated_products"],
        "delegates": report["delegates"],
        "outside": report["outside"],
        "program_mb": report["program_bytes"] / 1e6,
        "weights_mb": report["constant_bytes"] / 1e6,
        "planned_memory_mb": report["planned_memory_bytes"] / 1e6,
        "peak_rss_mb": alone["peak"] / 1e6,
        "runtime_rss_mb": alone["runtime"] / 1e6,
        "idle_rss_mb": alone["idle"] / 1e6,
        "memory_gb_per_second": bandwidth / 1e9,
        "product_gflops": {"1": rates[0] / 1e9, str(copies): rates[1] / 1e9},
        "export_seconds": export_seconds,
        "repeats": len(rounds),
    }
    if tangent is not None:
        figures |= {
            "tangent_over_limit": median(lambda seen: seen.tangent[1] / seen.tangent_limit),
            "tangent_host_share": median(lambda seen: 1 - seen.tangent[1] / seen.tangent[0]),
            "tangent_engine_seconds": median(lambda seen: seen.tangent[1]),
            "tangent_limit_seconds": median(lambda seen: seen.tangent_limit),
            "tangent_delegates": tangent.report["delegates"],
            "tangent_outside": tangent.report["outside"],
        }
    return figures


def least_time(program: ProductProgram, repeats: int) -> float:
    """The fastest of several calls; the program leaves the memory afterwards."""
    call = program.load()
    return min(call() for _ in range(repeats + 1))


@dataclass(frozen=True)
class Round:
    """One round of interleaved measurements: step and engine seconds, or seconds of a limit."""

    parallel: tuple[float, float]
    sequential: tuple[float, float]
    limit: float
    tangent: tuple[float, float] = (0.0, 0.0)
    tangent_limit: float = 0.0


def measure(
    parallel: Exported, sequential: Exported, tangent: Exported | None, queries: int, repeats: int
) -> tuple[list[Round], float]:
    """Rounds, and the largest difference of a scalar between all copies in one call and one at a time."""
    one_call, many_calls = parallel.step(queries), sequential.step(queries)
    limit = parallel.limit.load()
    tangents = None if tangent is None else (tangent.step(queries), tangent.limit.load())
    rounds = []
    difference = 0.0
    for repetition in range(repeats + 1):
        first = one_call()
        limit_seconds = limit()
        third = () if tangents is None else (tangents[0]()[:2], tangents[1]())
        second = many_calls()
        difference = max(difference, float(np.abs(np.subtract(first[2], second[2])).max()))
        if repetition:  # the first call of each warms caches up
            rounds.append(Round(first[:2], second[:2], limit_seconds, *third))
    return rounds, difference


def run_in_child(folder: Path, queries: int) -> dict[str, Any]:
    """What `run_alone` prints."""
    command = [sys.executable, __file__, "--alone", str(folder), "--queries", str(queries)]
    child = subprocess.run(command, check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Read the flags, run, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(CONFIGURATIONS), default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="make the model shallower")
    parser.add_argument("--quantize", nargs="+", default=["fp32", "8da4w"])
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--positions", type=int, default=1)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--target-modules", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--no-tangent", action="store_true", help="leave tangents out: two programs less in memory"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        run_alone(arguments.alone, arguments.queries, 4)
        return
    report_schemes(arguments, bench)


if __name__ == "__main__":
    main()
