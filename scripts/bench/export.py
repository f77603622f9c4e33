"""What an export takes: seconds, peak memory, size of the bundle, by scheme and estimator.

    python scripts/bench/export.py --model smollm2-135m --quantize fp32 --json out.json

The model is an architecture with random weights, written to a temporary folder in bfloat16. Every export is a
`prge export` in a process of its own; the estimators take turns, and figures are medians. Prints JSON:
`tangent_over_antithetic` is the ratio of the seconds, if both were asked for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reports import report

from server_export.model.random_models import CONFIGURATIONS, save_random_model


def main() -> None:
    """Read the flags, export, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=CONFIGURATIONS, default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="fewer layers than the architecture has")
    parser.add_argument("--quantize", nargs="+", default=["fp32", "8da4w"])
    parser.add_argument("--estimators", nargs="+", default=["tangent", "antithetic"])
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--positions", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file to write the figures to as well")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"model": arguments.model, "layers": arguments.layers, "schemes": {}}
    with tempfile.TemporaryDirectory() as temporary:
        save_random_model(Path(temporary, "model"), arguments.model, arguments.layers)
        for scheme in arguments.quantize:
            figures["schemes"][scheme] = exports(arguments, scheme, Path(temporary))
    report(figures, arguments.json)


def exports(arguments: argparse.Namespace, scheme: str, folder: Path) -> dict[str, Any]:
    """Medians of every estimator's exports, which take turns."""
    found: dict[str, list[dict[str, float]]] = {estimator: [] for estimator in arguments.estimators}
    for _ in range(arguments.repeats):
        for estimator, runs in found.items():
            runs.append(export(arguments, scheme, estimator, folder))
    medians: dict[str, Any] = {
        estimator: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for estimator, runs in found.items()
    }
    if {"tangent", "antithetic"} <= set(medians):
        seconds = (medians[estimator]["seconds"] for estimator in ("tangent", "antithetic"))
        medians["tangent_over_antithetic"] = next(seconds) / next(seconds)
    return medians


def export(arguments: argparse.Namespace, scheme: str, estimator: str, folder: Path) -> dict[str, float]:
    """One export in a process of its own."""
    out = folder / "bundle"
    flags = {
        "--model": folder / "model",
        "--out": out,
        "--quantize": scheme,
        "--estimator": estimator,
        "--queries": arguments.queries,
        "--batch-size": arguments.batch_size,
        "--sequence-length": arguments.seq_len,
        "--positions": arguments.positions,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "prge.cli", "export", *words, "--overwrite"], stdout=sys.stderr
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - start
    if status:
        raise SystemExit(f"prge export failed with status {os.waitstatus_to_exitcode(status)}")
    return {
        "seconds": seconds,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_mb": usage.ru_maxrss / 1024,
        "bundle_mb": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e6,
    }


if __name__ == "__main__":
    main()
