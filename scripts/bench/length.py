"""Rows per second of a run whose rows pay for their own length, against one fixed length.

    python scripts/bench/length.py --data train.tsv --model all-MiniLM-L6-v2 --json out.json

One bundle with methods of several lengths is exported. Steps on the same rows of the data are timed in pairs,
with the shortest method that holds a batch and with the longest, one after the other in one process and in
turns which goes first; figures are medians of the ratios. Prints JSON, by estimator: `rows_per_second_ratio`
of training steps and `score_ratio` of scoring, how far the scalars of both are apart, which lengths the steps
took, and what opening and running the programs of steps takes in time and anonymous memory.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from reports import report

from device_runner.engines.choice import choose
from device_runner.engines.length_engine import row_lengths
from device_runner.engines.programs import Programs, open_programs
from prge.adapter import Adapter
from prge.bundle import Bundle, open_bundle
from prge.differences import Antithetic, Differences
from prge.encoder_heads import fit_heads
from prge.engine import Engine
from prge.estimators import Estimator, Step
from prge.evaluation import score
from prge.examples import Batch, Example
from prge.head import Classifier
from prge.optimizers import Adam
from prge.peft import read_peft
from prge.rows.example_building import BuildOptions, load_examples
from prge.rows.readers import Selection
from prge.rows.task import load_task
from prge.rows.tokenizer import bundle_tokenizer
from prge.run_folder import environment
from prge.sampling import Sampler
from prge.tangents import Tangents

# An encoder's states have hundreds of features: fitted on fewer rows, a head makes no sense.
HEAD_ROWS = 1000
# Rows of a pair that are scored: several calls of them, so that there is something to sort.
SCORED = 160


def export_bundle(arguments: argparse.Namespace, estimator: str, folder: Path) -> Bundle:
    """The bundle with methods of all lengths; made in another process, whose memory isn't counted here."""
    flags: dict[str, Any] = {
        "model": arguments.model,
        "out": folder,
        "rank": arguments.rank,
        "estimator": estimator,
        "queries": arguments.queries,
        "batch-size": arguments.batch_size,
        "sequence-length": arguments.seq_len,
        "quantize": arguments.quantize,
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    words += ["--lengths", *map(str, arguments.lengths)]
    if arguments.target_modules:
        words += ["--target-modules", *arguments.target_modules]
    subprocess.run([sys.executable, "-m", "prge.cli", "export", *words], check=True, stdout=sys.stderr)
    return open_bundle(folder)


class Steps:
    """Training steps on the programs of some lengths."""

    def __init__(self, bundle: Bundle, arguments: argparse.Namespace, lengths: Sequence[int]) -> None:
        self.programs = open_programs(
            bundle, arguments.threads, engine=arguments.engine, lengths=lengths, keep=True
        )
        self.engine: Engine = self.programs.step
        load(self.programs, bundle, bundle.methods)
        self.estimator: Estimator = (
            Tangents() if bundle.contract.is_tangent else Differences(Antithetic(arguments.queries, 1e-2))
        )
        self.adapter = read_peft(bundle.adapter, bundle.contract.modules, bundle.adapter)
        self.optimizer = Adam(self.adapter.size)
        self.classifier: Classifier | None = None

    def seconds(self, batches: Sequence[Batch], first: int) -> float:
        """Time of a step for every batch; a rate of zero keeps the adapter."""
        start = time.perf_counter()
        for number, batch in enumerate(batches, first):
            found = self.estimator.measure(
                self.engine, Step(self.adapter, [batch], 0, number, self.classifier)
            )
            gradient = self.estimator.gradient(found.learnt, 0, number, self.adapter.modules)
            self.optimizer.update(self.adapter.values, gradient, 0.0)
        return time.perf_counter() - start

    def scalars(self, batch: Batch) -> np.ndarray[Any, Any]:
        """Those of one batch."""
        return self.estimator.measure(self.engine, Step(self.adapter, [batch], 0, 0, self.classifier)).scalars

    def score_seconds(self, examples: Sequence[Example], adapter: Adapter) -> float:
        """Time to score some examples."""
        start = time.perf_counter()
        score(self.programs.score, adapter, examples, self.classifier)
        return time.perf_counter() - start


def load(programs: Programs, bundle: Bundle, methods: Iterable[str]) -> None:
    """Load and run methods of the lengths that are used once, so that none is loaded while time is taken."""
    for method in methods:
        contract = bundle.methods[method]
        if contract.sequence_length in programs.lengths:
            inputs = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in contract.inputs}
            programs.loaded(method).forward(inputs)


def opened(folder: Path, engine: str, threads: int | None, every: bool) -> dict[str, float]:
    """Seconds and bytes that programs of steps take, of all lengths or the longest, in a fresh process."""
    bundle = open_bundle(folder)
    choose(engine)  # type: ignore[arg-type]
    if engine == "torch":
        importlib.import_module("torch")
    before, start = anonymous_bytes(), time.perf_counter()
    lengths = bundle.lengths if every else bundle.lengths[-1:]
    programs = open_programs(bundle, threads, engine=engine, lengths=lengths)  # type: ignore[arg-type]
    load(programs, bundle, bundle.variants(bundle.step_method))
    return {"seconds": time.perf_counter() - start, "bytes": anonymous_bytes() - before}


def opening(bundle: Bundle, threads: int | None) -> dict[str, Any]:
    """What opening takes on both engines."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    for engine in ("native", "torch"):
        for name, every in (("fixed", False), ("lengths", True)):
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                measured = pool.submit(opened, bundle.folder, engine, threads, every).result()
            found.setdefault(engine, {})[name] = measured
    return found


def anonymous_bytes() -> int:
    """The process's resident memory that no file backs."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def bench(arguments: argparse.Namespace, estimator: str, folder: Path) -> dict[str, Any]:
    """Export, interleave and measure one estimator."""
    start = time.perf_counter()
    bundle = export_bundle(arguments, estimator, folder / estimator)
    export_seconds = time.perf_counter() - start
    contract, tokenizer = bundle.contract, bundle_tokenizer(bundle)
    rows = max(arguments.rows, (arguments.repeats + 1) * arguments.steps * arguments.batch_size)
    examples, _ = load_examples(
        arguments.data, tokenizer, contract, load_task(arguments.task), Selection(0, rows, 0), BuildOptions()
    )
    open_figures = opening(bundle, arguments.threads)
    fixed = Steps(bundle, arguments, bundle.lengths[-1:])
    short = Steps(bundle, arguments, bundle.lengths)
    if contract.is_encoder:
        head = fit_heads(short.programs.score, short.adapter, examples[:HEAD_ROWS], tokenizer.pad_id).head
        fixed.classifier = short.classifier = head
    sampler = Sampler(examples, contract, 0, pad=tokenizer.pad_id)
    ratios, score_ratios, seconds, taken = [], [], [], Counter[int]()
    differences, largest = [], []
    for pair in range(arguments.repeats + 1):
        numbers = range(pair * arguments.steps, (pair + 1) * arguments.steps)
        batches = [batch for number in numbers for batch in sampler.batches(number)]
        scored = [examples[index % len(examples)] for index in range(pair * SCORED, (pair + 1) * SCORED)]
        order = [short, fixed] if pair % 2 else [fixed, short]
        times = {steps: steps.seconds(batches, numbers[0]) for steps in order}
        scoring = {steps: steps.score_seconds(scored, steps.adapter) for steps in order}
        if pair == 0:
            # Caches warm up: this pair isn't counted.
            continue
        ratios.append(times[fixed] / times[short])
        score_ratios.append(scoring[fixed] / scoring[short])
        seconds.append((times[fixed], times[short]))
        taken.update(length_of(bundle, batch) for batch in batches)
        values = fixed.scalars(batches[0])
        differences.append(float(np.abs(short.scalars(batches[0]) - values).max()))
        largest.append(float(np.abs(values).max()))
    median, per_pair = statistics.median, arguments.steps * arguments.batch_size
    tokens = [len(sequence.tokens) for example in examples for sequence in example.sequences]
    return {
        "rows_per_second_ratio": median(ratios),
        "rows_per_second_ratios": [min(ratios), max(ratios)],
        "rows_per_second": {
            "fixed": per_pair / median(first for first, _ in seconds),
            "lengths": per_pair / median(second for _, second in seconds),
        },
        "score_ratio": median(score_ratios),
        "largest_scalar_difference": max(differences),
        "largest_scalar": max(largest),
        "steps_by_length": {str(length): taken[length] for length in bundle.lengths},
        "tokens_of_a_row": {
            "mean": float(np.mean(tokens)),
            "median": float(np.median(tokens)),
            "largest": max(tokens),
            "rows": len(examples),
        },
        "opening": open_figures,
        "program_bytes": bundle.manifest["files"]["program.pte"]["bytes"],
        "engine": short.programs.engine,
        "export_seconds": export_seconds,
        "pairs": len(ratios),
    }


def length_of(bundle: Bundle, batch: Batch) -> int:
    """Length of the method that a batch goes through."""
    contract = bundle.contract
    inputs = batch.inputs(contract.given_rows // contract.batch_size, contract.is_encoder)
    tokens = int(row_lengths(inputs, contract).max())
    return next(length for length in bundle.lengths if length >= tokens)


def main() -> None:
    """Read the flags, run, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="rows of the task")
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--estimator", nargs="+", default=["tangent", "antithetic"])
    parser.add_argument("--quantize", default="fp32")
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="*", default=[])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--target-modules", nargs="+")
    parser.add_argument("--rows", type=int, default=2000, help="most rows to draw the steps from")
    parser.add_argument("--steps", type=int, default=6, help="of one side of a pair")
    parser.add_argument("--repeats", type=int, default=15, help="pairs")
    parser.add_argument("--engine", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        estimators = {name: bench(arguments, name, Path(folder)) for name in arguments.estimator}
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()
    }
    result = {
        "rows_per_second_ratio": {name: found["rows_per_second_ratio"] for name, found in estimators.items()},
        "estimators": estimators,
        "settings": settings,
        "machine": environment(),
    }
    report(result, arguments.json)


if __name__ == "__main__":
    main()
