"""Time of a training step on the engine: all copies in one call against one copy at a time.

    python scripts/bench_step.py --model smollm2-135m --queries 4 --batch-size 1 --seq-len 64 --json out.json

Both programs have the same random weights and run the same step (antithetic, the same directions and rows),
interleaved in one process; figures are medians. A second process runs the parallel program alone for its peak
memory. Prints JSON: the keys of the first scheme at the top, every scheme under `schemes`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from random_models import CONFIGURATIONS, random_model

from device_runner.executorch_engine import ExecutorchEngine
from device_runner.telemetry import PeakMemory, environment
from prge.adapter import Adapter
from prge.bundle import Bundle
from prge.contract import Contract
from prge.differences import Antithetic, Differences
from prge.engine import Engine
from prge.examples import Example, Slot, TokenSequence, make_batch
from prge.optimizers import Adam


def export_program(arguments: argparse.Namespace, scheme: str, copies: int, folder: Path) -> dict[str, Any]:
    """Write `program.pte` and its contract; answers the lowering's report."""
    from server_export.lowering import lower
    from server_export.program import STEP_METHOD, build_program
    from server_export.settings import ExportConfig
    from server_export.tangent.program import export_programs

    folder.mkdir(parents=True)
    config = ExportConfig(
        model=arguments.model,
        out=folder,
        target_modules=arguments.target_modules,
        rank=arguments.rank,
        estimator="antithetic",
        queries=arguments.queries,
        copies=copies,
        batch_size=arguments.batch_size,
        sequence_length=arguments.seq_len,
        positions=arguments.positions,
        quantize=scheme,
    )
    built = build_program(config, random_model(arguments.model, arguments.layers))
    lowered = lower(export_programs(built))
    (folder / "program.pte").write_bytes(lowered.buffer)
    (folder / "contract.json").write_text(json.dumps(built.contract.to_json()))
    return lowered.reports[STEP_METHOD].to_json()


def load(folder: Path) -> ExecutorchEngine:
    """Load a program that this script wrote."""
    contract = Contract.from_json(json.loads((folder / "contract.json").read_text()))
    return ExecutorchEngine.load(Bundle(folder, contract, {}), check=False)


class Step:
    """One training step on one engine."""

    def __init__(self, engine: Engine, queries: int) -> None:
        contract = engine.contract
        random = np.random.default_rng(0)
        self.engine = engine
        self.estimator = Differences(Antithetic(queries, 1e-2))
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
        found = self.estimator.measure(self.engine, self.adapter, [self.batch], 0, 0)
        gradient = self.estimator.gradient(found.scalars, 0, 0, self.adapter.modules)
        # A rate of zero keeps both programs on the same values, so that their scalars can be compared.
        self.optimizer.update(self.adapter.values, gradient, 0.0)
        return time.perf_counter() - start, found.engine_seconds, found.scalars.tolist()


def run_alone(folder: Path, queries: int, steps: int) -> None:
    """Run one program in a process of its own and print its figures."""
    memory = PeakMemory()
    idle = memory.report()["peak_bytes"]
    step = Step(load(folder), queries)
    timings = [step()[:2] for _ in range(steps)]
    print(json.dumps({"idle": idle, "peak": memory.report()["peak_bytes"], "timings": timings}))


def bench(arguments: argparse.Namespace, scheme: str, folder: Path) -> dict[str, Any]:
    """Export, interleave and measure one quantization scheme."""
    copies = 2 * arguments.queries
    start = time.perf_counter()
    report = export_program(arguments, scheme, copies, folder / "parallel")
    export_seconds = time.perf_counter() - start
    export_program(arguments, scheme, 1, folder / "sequential")
    parallel, sequential = (
        Step(load(folder / name), arguments.queries) for name in ("parallel", "sequential")
    )
    pairs = []
    difference = 0.0
    for repetition in range(arguments.repeats + 1):
        first, second = parallel(), sequential()
        difference = max(difference, float(np.abs(np.subtract(first[2], second[2])).max()))
        if repetition:  # the first call of each warms caches up
            pairs.append((first, second))
    command = [
        sys.executable,
        __file__,
        "--alone",
        str(folder / "parallel"),
        "--queries",
        str(arguments.queries),
    ]
    alone = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )
    median = statistics.median
    return {
        "parallel_speedup": median(second[0] / first[0] for first, second in pairs),
        "engine_seconds": median(first[1] for first, _ in pairs),
        "host_seconds": median(first[0] - first[1] for first, _ in pairs),
        "sequential_engine_seconds": median(second[1] for _, second in pairs),
        "largest_scalar_difference": difference,
        "delegated_share": report["delegated_share"],
        "delegated_products": report["delegated_products"],
        "delegates": report["delegates"],
        "outside": report["outside"],
        "program_mb": report["program_bytes"] / 1e6,
        "planned_memory_mb": report["planned_memory_bytes"] / 1e6,
        "peak_rss_mb": alone["peak"] / 1e6,
        "idle_rss_mb": alone["idle"] / 1e6,
        "export_seconds": export_seconds,
        "repeats": len(pairs),
    }


def main() -> None:
    """Read the flags, run, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(CONFIGURATIONS), default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="make the model shallower")
    parser.add_argument("--quantize", nargs="+", default=["fp32", "8da4w"])
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--positions", type=int, default=1)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--target-modules", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        run_alone(arguments.alone, arguments.queries, 4)
        return
    schemes = {}
    for scheme in arguments.quantize:
        with tempfile.TemporaryDirectory() as folder:
            schemes[scheme] = bench(arguments, scheme, Path(folder))
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "alone")}
    result = {
        **schemes[arguments.quantize[0]],
        "schemes": schemes,
        "settings": settings,
        "machine": environment(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
