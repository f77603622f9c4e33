"""What `prge estimate` says against what is: size of files, memory of export and run, seconds a step.

    python scripts/bench/estimate.py --models smollm2-135m qwen2.5-0.5b --layers 4 --json estimate.json

Every model is exported by `prge export` in a process of its own, and every run is a process of its own. The
estimate comes from the configuration alone. For its seconds calls of the calibration alternate with steps, so
that both meet the same machine; the fast ones count. Prints JSON: estimated over measured of every figure,
and the worst of each. The models are folders, or architectures with random weights, made shallower by
`--layers`. The torch engine's memory is gigabytes a block, so it is measured where it is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from reports import report

ROOT = Path(__file__).resolve().parents[2]
CALIBRATED_SECONDS = 8.0


def run_alone(folder: Path, engine: str, words: list[str]) -> dict[str, float]:
    """Peak memory of this process after two steps on a bundle, and estimated and measured seconds of one."""
    from device_runner.engines.opening import open_engines
    from device_runner.session.inputs import make_estimator
    from device_runner.session.settings import RunSettings, bundle_for, settled
    from prge.bundle import open_bundle
    from prge.estimators import Step
    from prge.examples import Example, Slot, TokenSequence, make_batch
    from prge.memory import PeakMemory
    from prge.peft import read_peft
    from prge.settings import parse_settings
    from server_export.settings import EstimateConfig

    config = parse_settings(EstimateConfig, words, "bench_estimate")
    bundle = open_bundle(folder)
    settings = RunSettings(
        bundle=folder,
        train=folder,
        out=folder,
        steps=1,
        learning_rate=0.1,
        estimator=config.estimator,
        queries=None if config.estimator == "exact" else config.queries,
        batch_size=config.batch_size,
        memory=config.memory,
    )
    settings = settled(settings, bundle)
    bundle = bundle_for(settings, bundle)
    engines = open_engines(bundle, engine=engine, memory=config.memory)  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    examples = []
    for row in range(config.batch_size):
        numbers = random.integers(0, bundle.chain.vocabulary_size, config.tokens).tolist()
        slots = tuple(Slot(place, token, 1.0, 0) for place, token in enumerate(numbers[1:]))
        examples.append(Example(row, (TokenSequence(tuple(numbers), slots),), 1, None))
    adapter = read_peft(bundle.adapter, bundle.contract.modules, bundle.adapter)
    step = Step(adapter, [make_batch(examples, bundle.contract)], 0, 0)
    estimator = make_estimator(settings)
    for _ in range(2):
        estimator.measure(engines.step, step)
    peak = PeakMemory().report()["peak_bytes"]

    from prge.costs import work_of
    from server_export.check.calibration import Calibration, fast
    from server_export.check.estimation import estimate

    found = estimate(config)
    contract = found.contract(config, config.tokens, config.tokens - 1)
    calibration = Calibration(found.outline, config.quantize, contract.computed_rows, config.tokens)
    taken: list[float] = []
    end = time.perf_counter() + CALIBRATED_SECONDS
    while time.perf_counter() < end or len(taken) < 5:
        calibration.sample()
        start = time.perf_counter()
        estimator.measure(engines.step, step)
        taken.append(time.perf_counter() - start)
    seconds = calibration.rates().seconds(work_of(found.outline, contract))
    return {"peak_bytes": peak, "estimated_seconds": seconds, "seconds": fast(taken)}


def compare(model: Path, scheme: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One export and its runs against the estimate."""
    export = ["--model", str(model), "--quantize", scheme, "--sequence-length", str(arguments.longest)]
    command = [sys.executable, "-m", "prge.cli"]
    bundle, cache = folder / "bundle", folder / "cache"
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, "export", "--overwrite", "--out", str(bundle), *export], stdout=sys.stderr
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"prge export failed with status {os.waitstatus_to_exitcode(status)}")
    pairs = {"export_seconds": (0.0, time.monotonic() - start)}
    for estimator in arguments.estimators:
        for rows, tokens in arguments.shapes:
            run = ["--estimator", estimator, "--batch-size", str(rows), "--tokens", str(tokens)]
            words = [*export, *run]
            estimated = json.loads(_output([*command, "estimate", "--json", "--no-calibrate", *words]))
            for engine in arguments.engines:
                done = _output([sys.executable, __file__, "--alone", str(bundle), engine, *words], cache)
                measured = json.loads(done.splitlines()[-1])
                name = f"{estimator}_{rows}x{tokens}"
                expected = estimated["run_memory"][engine]["total_bytes"]
                pairs[f"memory_{engine}_{name}"] = (expected, measured["peak_bytes"])
                pairs[f"seconds_{engine}_{name}"] = (measured["estimated_seconds"], measured["seconds"])
    pairs |= {
        "programs": (estimated["programs_bytes"], _bytes(bundle / "programs")),
        "weights": (estimated["weights_bytes"], _bytes(bundle / "weights")),
        "packed": (estimated["packed_bytes"], _bytes(cache / "prge" / "packed")),
        "export_memory": (estimated["export"]["peak_bytes"], usage.ru_maxrss * 1024),
        "export_seconds": (estimated["export"]["seconds"], pairs["export_seconds"][1]),
    }
    return {
        name: {"estimated": round(ours, 4), "measured": round(theirs, 4), "ratio": round(ours / theirs, 3)}
        for name, (ours, theirs) in pairs.items()
        if theirs
    }


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*"))


def _output(command: list[str], cache: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if cache is not None:
        environment["XDG_CACHE_HOME"] = str(cache)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}\n{done.stderr}")
    return done.stdout


def shape_of(text: str) -> tuple[int, int]:
    """Rows and tokens of `2x64`."""
    rows, tokens = text.split("x")
    return int(rows), int(tokens)


def main() -> None:
    """Read the flags, compare, print JSON."""
    if sys.argv[1:2] == ["--alone"]:
        print(json.dumps(run_alone(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--layers", type=int, help="makes the models shallower")
    parser.add_argument("--quantize", nargs="+", default=["fp32", "8da4w"])
    parser.add_argument("--estimators", nargs="+", default=["tangent", "antithetic", "exact"])
    parser.add_argument("--engines", nargs="+", default=["native"])
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[(4, 64), (1, 128)])
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest row")
    parser.add_argument("--json", type=Path, help="file to write the figures to as well")
    arguments = parser.parse_args()
    from server_export.model.random_models import save_random_model

    found = []
    for name in arguments.models:
        for scheme in arguments.quantize:
            with tempfile.TemporaryDirectory() as temporary:
                model = Path(name)
                if not model.is_dir():
                    model = Path(temporary, "model")
                    save_random_model(model, name, arguments.layers)
                figures = compare(model, scheme, arguments, Path(temporary))
            found.append({"model": name, "quantize": scheme, "figures": figures})
            print(name, scheme, {key: pair["ratio"] for key, pair in figures.items()}, file=sys.stderr)
    names = {name for entry in found for name in entry["figures"]}
    worst = {
        name: max(
            (entry["figures"][name]["ratio"] for entry in found if name in entry["figures"]),
            key=lambda ratio: abs(ratio - 1),
        )
        for name in sorted(names)
    }
    report({"worst_ratio": worst, "layers": arguments.layers, "bundles": found}, arguments.json)


if __name__ == "__main__":
    main()
