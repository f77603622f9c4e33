"""Time of a step on a chain of small programs over that on one program of the whole model.

    python scripts/bench/chain.py --model smollm2-135m --quantize 8da4w fp32 --json chain.json

A model with random weights is exported once as a chain with all roles, and as one program for every estimator
and shape. Both take the same steps on the same rows, in turns, in one process; figures are medians. Prints
JSON: `chain_over_monolith` by scheme, estimator and shape (rows x tokens), the seconds of both, how far apart
their losses are, and seconds, peak memory and sizes of the chain's export.
"""

from __future__ import annotations

import argparse
import gc
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from random_model import random_model
from reports import report

from device_runner.engines.programs import Engines, open_engines
from device_runner.session.inputs import make_estimator
from device_runner.session.settings import RunSettings, bundle_for, settled
from prge.adapter import Adapter
from prge.bundle import open_bundle
from prge.estimators import Estimator, Measurement, Step
from prge.examples import Example, Slot, TokenSequence, make_batch
from prge.peft import read_peft
from prge.run_folder import environment
from server_export.demo import DATA
from server_export.model.random_models import CONFIGURATIONS

ESTIMATORS = {"tangent": ["--queries", "4"], "antithetic": ["--queries", "4"], "exact": []}


@dataclass
class TimedStep:
    """A step on an opened bundle."""

    engines: Engines
    estimator: Estimator
    step: Step

    def __call__(self) -> tuple[float, Measurement]:
        """Take it once: seconds, and what was measured."""
        begin = time.perf_counter()
        measurement = self.estimator.measure(self.engines.step, self.step)
        return time.perf_counter() - begin, measurement


def save_model(name: str, layers: int | None, folder: Path) -> Path:
    """A model with random weights, and some tokenizer."""
    random_model(name, layers).model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "model" / file, folder)
    return folder


def export(model: Path, out: Path, *flags: str) -> dict[str, float]:
    """Call `prge export`; seconds, and the most memory that any export took so far."""
    begin = time.monotonic()
    words = [sys.executable, "-m", "prge.cli", "export", "--model", str(model), "--out", str(out), *flags]
    subprocess.run([*words, "--overwrite"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"seconds": time.monotonic() - begin, "peak_rss_mb": peak / 1024}


def timed_step(folder: Path, estimator: str, rows: int, tokens: int, threads: int) -> TimedStep:
    """The same step on a bundle of any form."""
    bundle = open_bundle(folder)
    settings = RunSettings(
        bundle=folder,
        train=folder,
        out=folder,
        steps=1,
        learning_rate=0.1,
        estimator=estimator,  # type: ignore[arg-type]
        queries=4 if ESTIMATORS[estimator] else None,
        batch_size=rows if bundle.chain else None,
    )
    settings = settled(settings, bundle)
    bundle = bundle_for(settings, bundle)
    engines = open_engines(bundle, threads)
    adapter: Adapter = read_peft(bundle.adapter, bundle.contract.modules, bundle.adapter)
    random = np.random.default_rng(0)
    adapter.values[:] = random.standard_normal(adapter.size) * 0.01
    examples = []
    for row in range(rows):
        numbers = random.integers(0, bundle.contract.vocabulary_size, tokens).tolist()
        slots = tuple(Slot(place, numbers[place + 1], 1 / (tokens - 1), 0) for place in range(tokens - 1))
        examples.append(Example(row, (TokenSequence(tuple(numbers), slots),), 1, None))
    step = Step(adapter, [make_batch(examples, bundle.contract)], 0, 0)
    return TimedStep(engines, make_estimator(settings), step)


def compared(monolith: TimedStep, chain: TimedStep, pairs: int) -> dict[str, float]:
    """Both in turns, and in turns which goes first."""
    seconds: tuple[list[float], list[float]] = [], []
    (_, first), (_, second) = monolith(), chain()
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            seconds[which].append((monolith, chain)[which]()[0])
    one, other = map(statistics.median, seconds)
    return {
        "chain_over_monolith": statistics.median(b / a for a, b in zip(*seconds, strict=True)),
        "monolith_seconds": one,
        "chain_seconds": other,
        "loss_difference": abs(first.loss - second.loss),
    }


def bench(arguments: argparse.Namespace, scheme: str, model: Path, folder: Path) -> dict[str, Any]:
    """All estimators and shapes with one scheme."""
    longest = max(tokens for _, tokens in arguments.shapes)
    chain = folder / "chain"
    words = ["--quantize", scheme, "--sequence-length", str(longest), "--roles", "stack", "tangent", "back"]
    figures: dict[str, Any] = {"export": export(model, chain, *words), "estimators": {}}
    figures["export"] |= {
        f"{name}_bytes": sum(path.stat().st_size for path in (chain / name).iterdir())
        for name in ("programs", "weights")
    }
    for estimator in arguments.estimators:
        ratios = figures["estimators"][estimator] = {}
        for rows, tokens in arguments.shapes:
            monolith = folder / "monolith"
            words = ["--quantize", scheme, "--estimator", estimator, *ESTIMATORS[estimator]]
            export(model, monolith, *words, "--batch-size", str(rows), "--sequence-length", str(tokens))
            first, second = (
                timed_step(path, estimator, rows, tokens, arguments.threads) for path in (monolith, chain)
            )
            ratios[f"{rows}x{tokens}"] = compared(first, second, arguments.pairs)
            del first, second
            gc.collect()
    return figures


def shape_of(text: str) -> tuple[int, int]:
    """Rows and tokens of `2x64`."""
    rows, tokens = text.split("x")
    return int(rows), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(CONFIGURATIONS), default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="makes the model shallower")
    parser.add_argument("--quantize", nargs="+", default=["8da4w", "fp32"])
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS))
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[(2, 64), (1, 16)])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model(arguments.model, arguments.layers, folder / "model")
        schemes = {scheme: bench(arguments, scheme, model, folder) for scheme in arguments.quantize}
    settings = {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)}
    report({"schemes": schemes, "settings": settings, "machine": environment()}, arguments.json)


if __name__ == "__main__":
    main()
