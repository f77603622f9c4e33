"""What `prge estimate` says against what is: size of the file, memory of export and run, seconds a step.

    python scripts/bench/estimate.py --models smollm2-135m qwen2.5-0.5b --layers 4 --json estimate.json

Every program is exported by `prge export` in a process of its own, and run in another one on either engine.
The estimate comes from the configuration alone. For its seconds calls of the calibration alternate with calls
of the program, so that both meet the same machine; the fast ones count. Prints JSON: estimated over measured
of every figure, and the worst of each. The models are folders, or architectures with random weights, made
shallower by `--layers`.
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

from reports import report

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("native", "torch")


def run_alone(folder: Path, engine: str, method: str) -> dict[str, float]:
    """Peak memory of this process when it has loaded one method of a bundle and called it twice."""
    import device_runner.run  # noqa: F401, what the driver holds
    from device_runner.engines.base import probing_inputs
    from device_runner.engines.choice import Backend
    from prge.bundle import open_bundle
    from prge.memory import PeakMemory

    bundle = open_bundle(folder)
    inputs = probing_inputs(bundle.methods[method])
    loaded = Backend(engine).engine.load(bundle, check=False, method=method)
    for _ in range(2):
        loaded.forward(inputs)
    return {"peak_bytes": PeakMemory().report()["peak_bytes"]}


def seconds_of(folder: Path, words: list[str], budget: float) -> dict[str, tuple[float, float]]:
    """Estimated and measured seconds of a call of every method; the calls alternate with a calibration's."""
    from device_runner.engines.base import probing_inputs
    from device_runner.engines.choice import Backend
    from prge.bundle import open_bundle
    from prge.costs import work_of
    from prge.settings import parse_settings
    from server_export.check.calibration import Calibration, fast
    from server_export.check.estimation import estimate
    from server_export.settings import EstimateConfig

    found = estimate(parse_settings(EstimateConfig, words, "bench_estimate"))
    bundle = open_bundle(folder)
    loaded = {name: Backend("torch").engine.load(bundle, check=False, method=name) for name in bundle.methods}
    inputs = {name: probing_inputs(contract) for name, contract in bundle.methods.items()}
    contract = found.contract
    calibration = Calibration(
        found.outline, found.config.quantize, contract.computed_rows, contract.sequence_length
    )
    taken: dict[str, list[float]] = {name: [] for name in loaded}
    for name, engine in loaded.items():
        engine.forward(inputs[name])
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(taken["forward"]) < 5:
        for name, engine in loaded.items():
            calibration.sample()
            start = time.perf_counter()
            engine.forward(inputs[name])
            taken[name].append(time.perf_counter() - start)
    rates = calibration.rates()
    return {
        name: (rates.seconds(work_of(found.outline, bundle.methods[name])), fast(seconds))
        for name, seconds in taken.items()
    }


def compare(model: Path, flags: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One export and its runs against the estimate."""
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "prge.cli"]
    estimated = json.loads(
        _output([*command, "estimate", "--json", "--no-calibrate", "--model", model, *words])
    )
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
    pairs = {
        "file": (estimated["program_bytes"], (bundle / "program.pte").stat().st_size),
        "export_memory": (estimated["export"]["peak_bytes"], usage.ru_maxrss * 1024),
        "export_seconds": (estimated["export"]["seconds"], exported),
    }
    memories = [("run", engine, "forward") for engine in ENGINES]
    if estimated["scoring"]:
        memories.append(("score", "native", "score"))
    for what, engine, method in memories:
        expected = estimated[f"{what}_memory"][engine]["peak_bytes"]
        pairs[f"{what}_memory_{engine}"] = (expected, _child("--alone", bundle, engine, method)["peak_bytes"])
    seconds = _child("--alternate", bundle, "--model", model, *words)
    pairs |= {f"{method}_seconds": tuple(pair) for method, pair in seconds.items()}
    return {
        name: {"estimated": round(ours, 4), "measured": round(theirs, 4), "ratio": round(ours / theirs, 3)}
        for name, (ours, theirs) in pairs.items()
    }


def _child(*words: object) -> dict[str, Any]:
    return dict(json.loads(_output([sys.executable, __file__, *words])))


def _output(command: list[object]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Read the flags, compare, print JSON."""
    if sys.argv[1:2] == ["--alone"]:
        print(json.dumps(run_alone(Path(sys.argv[2]), *sys.argv[3:])))
        return
    if sys.argv[1:2] == ["--alternate"]:
        print(json.dumps(seconds_of(Path(sys.argv[2]), sys.argv[3:], 8.0)))
        return
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
    parser.add_argument("--positions", type=int, default=8)
    parser.add_argument("--json", type=Path, help="file to write the figures to as well")
    arguments = parser.parse_args()
    from server_export.model.random_models import save_random_model

    found = []
    shapes = product(
        arguments.quantize, arguments.estimators, arguments.queries, arguments.batch_size, arguments.seq_len
    )
    with tempfile.TemporaryDirectory() as temporary:
        settings = list(shapes)
        for name in arguments.models:
            model = Path(name)
            if not model.is_dir():
                model = Path(temporary, name)
                save_random_model(model, name, arguments.layers)
            for scheme, estimator, queries, batch_size, length in settings:
                flags = {
                    "quantize": scheme,
                    "estimator": estimator,
                    "queries": queries,
                    "batch-size": batch_size,
                    "sequence-length": length,
                    "positions": arguments.positions,
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
    report({"worst_ratio": worst, "layers": arguments.layers, "programs": found}, arguments.json)


if __name__ == "__main__":
    main()
