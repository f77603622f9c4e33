"""Memory of a step on a device and the time to start, by model and by the bound of `--memory`.

    python scripts/bench/device_memory.py --models smollm2-135m tinyllama-1.1b --json memory.json
    python scripts/bench/device_memory.py --bundles BUNDLE --json memory.json

A model is an architecture with random weights, exported for a while; or BUNDLE is measured, under the name
of its folder. Bounds are `all`, with every block's weights loaded, and `least`, with those of the largest
block. Every figure is the median over processes of their own, which import what `prge run` imports, open
the bundle and take two steps. Weights were packed before. Prints JSON: by model and bound `anonymous_mb`,
what no file can give back, `peak_rss_mb`, pages of mapped files with it, and `start_seconds` until the
engine is ready.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import watched
from reports import parser_of, report

BOUNDS = ("all", "least")


def measure(bundle: Path, bound: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Open a bundle in this process and take two steps."""
    begin = time.perf_counter()
    from timing import least_memory, timed_step

    import device_runner.run  # noqa: F401, what the driver holds

    memory = least_memory(bundle) if bound == "least" else None
    shape = (arguments.batch_size, arguments.seq_len, arguments.threads)
    with watched(os.getpid()) as peak:
        step = timed_step(bundle, arguments.estimator, *shape, memory=memory, engine=arguments.engine)
        ready = time.perf_counter() - begin
        step()
        step()
    return {"anonymous_mb": peak.anonymous_mb, "peak_rss_mb": peak.peak_rss_mb, "start_seconds": ready}


def in_children(
    bundle: Path, bound: str, words: Sequence[object], repeats: int = 1, **environment: str
) -> dict[str, float]:
    """Medians of `measure` in processes of their own, but for the first, which may pack weights."""
    command = [sys.executable, __file__, *map(str, words), "--measure", str(bundle), bound]
    variables: Mapping[str, str] = {"OMP_NUM_THREADS": "1", **os.environ, **environment}
    found = []
    for _ in range(1 + repeats):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=variables)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: statistics.median(child[name] for child in found[1:]) for name in found[0]}


def main() -> None:
    """Read the flags, export, measure, print JSON."""
    shape = {"batch_size": 1, "seq_len": 64, "threads": 1}
    parser = parser_of(__doc__, quantize="8da4w", estimator="tangent", engine="auto", **shape)
    parser.add_argument("--models", nargs="*", default=[], help="such as smollm2-135m")
    parser.add_argument("--bundles", nargs="*", type=Path, default=[], help="measured besides")
    parser.add_argument("--repeats", type=int, default=3, help="processes a figure")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(Path(arguments.measure[0]), arguments.measure[1], arguments)))
        return
    figures: dict[str, Any] = {}

    def add(name: str, bundle: Path) -> None:
        repeats = arguments.repeats
        figures[name] = {bound: in_children(bundle, bound, sys.argv[1:], repeats) for bound in BOUNDS}

    for model in arguments.models:
        # Only here: a measured process has no exporter.
        from timing import export, random_model

        with random_model(model, arguments.layers) as folder:
            export(folder / "model", folder / "bundle", "--quantize", arguments.quantize)
            add(model, folder / "bundle")
    for bundle in arguments.bundles:
        add(bundle.name, bundle)
    report(figures, arguments)


if __name__ == "__main__":
    main()
