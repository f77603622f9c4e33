"""What `prge estimate` says against what is: size of files, memory of export and run.

    python scripts/bench/estimate.py --models smollm2-135m:8 qwen2.5-0.5b:4 --json estimate.json

Every model is exported by `prge export` in a process of its own, and every run is a process of its own, with
all weights loaded or, bound `least`, with as few as may be. Anonymous memory is what no file can give back,
resident memory has pages of files with it. The estimate comes from the configuration alone. Prints JSON:
estimated over measured of every figure, and the worst of each. The models are folders, or architectures with
random weights, made shallower by a number of layers after a colon. The torch engine takes gigabytes for a
model, so it is measured where it is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from reports import report

ROOT = Path(__file__).resolve().parents[2]
# Between two looks at a process's memory.
_LOOK_SECONDS = 0.003


def run_alone(folder: Path, engine: str, words: list[str]) -> dict[str, float]:
    """Peaks of this process's memory in two steps on a bundle."""
    import device_runner.run  # noqa: F401, what the driver holds
    from device_runner.engines.checkpoints import Checkpoints
    from device_runner.engines.opening import open_engines
    from device_runner.session.planning import plan_run
    from device_runner.session.settings import RunSettings
    from prge.files.bundle import open_bundle
    from prge.files.peft import read_peft
    from prge.learning.estimators.protocol import Step
    from prge.learning.estimators.table import make_estimator
    from prge.learning.examples import Example, Slot, TokenSequence, make_batch
    from prge.verbs.settings import parse_settings

    # Importable without torch.
    from server_export.settings import EstimateConfig

    config = parse_settings(EstimateConfig, words, "bench_estimate")
    # What was written a moment ago lies in the cache in larger pieces than what is read page by page.
    for path in (folder / "weights").iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
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
    plan = plan_run(bundle, [], settings)
    checkpoints = Checkpoints(folder=folder, most=config.memory)
    engines = open_engines(
        bundle,
        plan.contract,
        engine=engine,  # type: ignore[arg-type]
        memory=config.memory,
        scoring=plan.scoring,
        checkpoints=checkpoints,
    )
    random = np.random.default_rng(0)
    examples = []
    for row in range(config.batch_size):
        numbers = random.integers(0, bundle.chain.vocabulary_size, config.tokens).tolist()
        slots = tuple(Slot(place, token, 1.0, 0) for place, token in enumerate(numbers[1:]))
        examples.append(Example(row, (TokenSequence(tuple(numbers), slots),), 1, None))
    adapter = read_peft(bundle.adapter, bundle.chain.modules, bundle.adapter)
    step = Step(adapter, [make_batch(examples, plan.contract)], 0, 0)
    estimator = make_estimator(plan.settings)
    ended, anonymous = threading.Event(), [0]

    def look() -> None:
        while not ended.wait(_LOOK_SECONDS):
            anonymous[0] = max(anonymous[0], _status()["RssAnon"])

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(2):
        estimator.measure(engines.step, step)
    ended.set()
    looking.join()
    return {"anonymous_bytes": anonymous[0], "resident_bytes": _status()["VmHWM"]}


def _status() -> dict[str, int]:
    """Sizes that the system tells of this process, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def compare(model: Path, scheme: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One export and its runs against the estimate."""
    export = ["--model", str(model), "--quantize", scheme, "--sequence-length", str(arguments.longest)]
    command = [sys.executable, "-m", "prge.cli"]
    bundle, cache = folder / "bundle", folder / "cache"
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, "export", "--overwrite", "--no-cache", "--out", str(bundle), *export], stdout=sys.stderr
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"prge export failed with status {os.waitstatus_to_exitcode(status)}")
    pairs = {"export_seconds": (0.0, time.monotonic() - start)}
    for estimator in arguments.estimators:
        for rows, tokens in arguments.shapes:
            run = ["--estimator", estimator, "--batch-size", str(rows), "--tokens", str(tokens)]
            words = [*export, *run]
            least = max(path.stat().st_size for path in (bundle / "weights").iterdir())
            for bound, memory in {"all": [], "least": ["--memory", str(least)]}.items():
                estimated = json.loads(_output([*command, "estimate", "--json", *words, *memory]))
                for engine in arguments.engines:
                    alone = [sys.executable, __file__, "--alone", str(bundle), engine, *words, *memory]
                    measured = json.loads(_output(alone, cache).splitlines()[-1])
                    name, expected = f"{engine}_{estimator}_{rows}x{tokens}", estimated["run_memory"][engine]
                    sizes = {"anonymous": "anonymous_bytes", "resident": "total_bytes"}
                    for size, key in sizes.items():
                        pairs[f"{size}_{name}_{bound}"] = (expected[key], measured[f"{size}_bytes"])
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
    parser.add_argument("--quantize", nargs="+", default=["fp32", "8da4w"])
    parser.add_argument("--estimators", nargs="+", default=["tangent", "antithetic", "exact"])
    parser.add_argument("--engines", nargs="+", default=["native"])
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[(4, 64), (1, 256)])
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
                    architecture, _, layers = name.partition(":")
                    save_random_model(model, architecture, int(layers) if layers else None)
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
    report({"worst_ratio": worst, "bundles": found}, arguments.json)


if __name__ == "__main__":
    main()
