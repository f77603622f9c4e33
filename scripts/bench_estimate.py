"""What `prge estimate` says against what is: size of the file, memory of export and run, seconds a step.

    python scripts/bench_estimate.py --models smollm2-135m qwen2.5-0.5b --layers 4 --json estimate.json

Every program is exported by `prge export` in a process of its own, and run in another one on either engine.
The estimate comes from the configuration alone; its seconds are for the fast calls of a machine that does
nothing else, and so are the measured ones. Prints JSON: estimated over measured of every figure, and the
worst of each. The models are architectures with random weights, made shallower by `--layers`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("native", "torch")


def run_alone(folder: Path, engine: str, method: str, seconds: float) -> dict[str, float]:
    """Load one method of a bundle in this process, call it for a while."""
    import device_runner.run  # noqa: F401, what the driver holds
    from device_runner.engine_base import probing_inputs
    from device_runner.engines import Backend
    from device_runner.telemetry import PeakMemory
    from prge.bundle import open_bundle

    memory = PeakMemory()
    bundle = open_bundle(folder)
    contract = bundle.methods[method]
    inputs = probing_inputs(contract)
    before = memory.report()["peak_bytes"]
    loaded = Backend(engine).load(bundle, check=False, method=method)
    loaded.forward(inputs)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        loaded.forward(inputs)
        taken.append(time.perf_counter() - start)
    return {
        "seconds": sorted(taken)[len(taken) // 10],
        "runtime_bytes": before,
        "peak_bytes": memory.report()["peak_bytes"],
    }


def compare(model: Path, flags: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One export and its runs against the estimate."""
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "prge.cli"]
    estimated = json.loads(_output([*command, "estimate", "--json", "--model", model, *words]))
    bundle = folder / "bundle"
    start = time.monotonic()
    process = subprocess.Popen(
        [*map(str, command), "export", "--overwrite", "--model", str(model), "--out", str(bundle), *words],
        stdout=sys.stderr,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"prge export failed with status {os.waitstatus_to_exitcode(status)}")
    exported = time.monotonic() - start
    alone = {engine: _alone(bundle, engine, "forward") for engine in ENGINES}
    step = min(found["seconds"] for found in alone.values()) * estimated["step"]["calls"]
    pairs = {
        "file": (estimated["program_bytes"], (bundle / "program.pte").stat().st_size),
        "export_memory": (estimated["export"]["peak_bytes"], usage.ru_maxrss * 1024),
        "export_seconds": (estimated["export"]["seconds"], exported),
        "step_seconds": (estimated["step"]["seconds"], step),
    }
    for engine, found in alone.items():
        pairs[f"run_memory_{engine}"] = (
            estimated["run_memory"][engine]["peak_bytes"],
            found["peak_bytes"],
        )
    if estimated["scoring"]:
        score = _alone(bundle, "native", "score")
        pairs["score_seconds"] = (estimated["scoring"]["seconds"], score["seconds"])
        pairs["score_memory_native"] = (
            estimated["score_memory"]["native"]["peak_bytes"],
            score["peak_bytes"],
        )
    return {
        name: {"estimated": round(ours, 4), "measured": round(theirs, 4), "ratio": round(ours / theirs, 3)}
        for name, (ours, theirs) in pairs.items()
    }


def _alone(bundle: Path, engine: str, method: str) -> dict[str, float]:
    return dict(json.loads(_output([sys.executable, __file__, "--alone", bundle, engine, method])))


def _output(command: list[object]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Read the flags, compare, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--layers", type=int, help="makes the models shallower")
    parser.add_argument("--quantize", nargs="+", default=["fp32", "8da4w"])
    parser.add_argument("--estimators", nargs="+", default=["tangent", "antithetic"])
    parser.add_argument("--queries", nargs="+", type=int, default=[4])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1])
    parser.add_argument("--seq-len", nargs="+", type=int, default=[64])
    parser.add_argument("--json", type=Path, help="file to write the figures to as well")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        folder, engine, method = arguments.alone
        print(json.dumps(run_alone(Path(folder), engine, method, 4.0)))
        return
    from random_models import save_random_model

    found = []
    shapes = product(
        arguments.quantize, arguments.estimators, arguments.queries, arguments.batch_size, arguments.seq_len
    )
    with tempfile.TemporaryDirectory() as temporary:
        settings = list(shapes)
        for name in arguments.models:
            model = Path(temporary, name)
            save_random_model(model, name, arguments.layers)
            for scheme, estimator, queries, batch_size, length in settings:
                flags = {
                    "quantize": scheme,
                    "estimator": estimator,
                    "queries": queries,
                    "batch-size": batch_size,
                    "sequence-length": length,
                }
                figures = compare(model, flags, Path(temporary))
                found.append({"model": name, **flags, "figures": figures})
                print(name, flags, {key: pair["ratio"] for key, pair in figures.items()}, file=sys.stderr)
    names = {name for entry in found for name in entry["figures"]}
    worst = {
        name: max(
            (entry["figures"][name]["ratio"] for entry in found if name in entry["figures"]),
            key=lambda ratio: abs(ratio - 1),
        )
        for name in sorted(names)
    }
    text = json.dumps({"worst_ratio": worst, "layers": arguments.layers, "programs": found}, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
