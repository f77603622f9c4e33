"""Memory of exact steps: backpropagation with one block's weights at a time, by model.

    python scripts/bench/exact_memory.py --models qwen2.5-0.5b gemma3-1b --json memory.json

A model is an architecture with random weights. It is exported; a `prge run` packs its weights; another one
takes steps on rows of random letters, with the least bound of `--memory`, and is what is measured, from its
start to its end. Prints JSON by model: `anonymous_mb`, the most that no file could give back, `peak_rss_mb`
(VmHWM), pages of mapped files with it, `step_seconds`, the median, `packing_anonymous_mb` and
`packing_peak_rss_mb` of the first run with its children, and what the export took; with `--check N` the least
`cosine` of any gradient of N blocks with PyTorch's (scripts/bench/reference.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from processes import watched
from reports import parser_of, report
from timing import export, least_memory, random_model


def measure(arguments: argparse.Namespace, model: str, place: Path) -> dict[str, Any]:
    """Export a model, pack it, take steps."""
    if not (place / "bundle").is_dir():
        exported = exported_bundle(arguments, model, place)
        (place / "export.json").write_text(json.dumps(exported), encoding="utf-8")
    write_rows(place / "rows.jsonl", 4 * arguments.batch_size, arguments.seq_len)
    packing = run(arguments, place, steps=1)
    found = run(arguments, place, arguments.steps)
    exported = json.loads((place / "export.json").read_text(encoding="utf-8"))
    return {
        **found,
        **{f"packing_{name}": packing[name] for name in ("anonymous_mb", "peak_rss_mb", "seconds")},
        **{f"export_{name}": value for name, value in exported.items()},
    }


def exported_bundle(arguments: argparse.Namespace, model: str, place: Path) -> dict[str, float]:
    """Export a model as `bundle`, and check its gradients; what the export took."""
    bundle = place / "bundle"
    flags = ["--quantize", arguments.quantize, "--rank", str(arguments.rank), "--roles", "stack", "back"]
    flags += ["--target-modules", *arguments.target_modules] if arguments.target_modules else []
    with random_model(model, arguments.layers, place) as folder:
        source = folder / "model"
        exported = export(source, bundle, *flags, "--sequence-length", str(arguments.seq_len))
        if arguments.check:
            from reference import gradient_cosine

            os.environ["XDG_CACHE_HOME"] = str(place / "cache")
            shape = (arguments.batch_size, arguments.seq_len)
            exported["cosine"] = gradient_cosine(source, bundle, arguments.quantize, *shape, arguments.check)
            shutil.rmtree(place / "cache")
    return exported


def write_rows(path: Path, count: int, tokens: int) -> None:
    """Rows of random letters, a token each."""
    letters = random.Random(0)
    texts = ("".join(letters.choices(string.ascii_letters, k=tokens)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def run_command(place: Path, rows: int, steps: int, threads: int) -> list[str]:
    """`prge run` of `place`'s bundle and rows in its folder `run`, with the least memory for weights."""
    words = [sys.executable, "-m", "prge.cli", "run", "--estimator", "exact", "--quiet"]
    words += ["--bundle", str(place / "bundle"), "--train", str(place / "rows.jsonl")]
    words += ["--memory", str(least_memory(place / "bundle")), "--threads", str(threads)]
    return [*words, "--out", str(place / "run"), "--batch-size", str(rows), "--steps", str(steps)]


def step_seconds(run: Path) -> float:
    """The median over the steps of a run."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    taken = [record for record in map(json.loads, lines) if record["event"] == "step"]
    return float(statistics.median(record["engine_seconds"] + record["host_seconds"] for record in taken))


def run(arguments: argparse.Namespace, place: Path, steps: int) -> dict[str, float]:
    """A `prge run` of its own, watched."""
    shutil.rmtree(place / "run", ignore_errors=True)
    words = run_command(place, arguments.batch_size, steps, arguments.threads)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    begin = time.monotonic()
    with subprocess.Popen(words, stdout=sys.stderr, env=environment) as process, watched(process.pid) as peak:
        process.wait()
    if process.returncode:
        raise SystemExit(f"prge run ended with code {process.returncode}")
    return {
        **asdict(peak),
        "step_seconds": step_seconds(place / "run"),
        "seconds": time.monotonic() - begin,
    }


def main() -> None:
    """Read the flags, measure model after model, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen2.5-0.5b"])
    parser.add_argument("--quantize", default="8da4w")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--target-modules", nargs="*", help="by default PEFT's choice: query and value")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", type=int, default=0, help="blocks of a Llama or Qwen to compare")
    parser.add_argument("--folder", type=Path, help="where bundles are kept, and taken from the next time")
    arguments = parser.parse_args()
    figures = {}
    for model in arguments.models:
        with ExitStack() as stack:
            if arguments.folder is None:
                place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            else:
                place = arguments.folder / model
                place.mkdir(parents=True, exist_ok=True)
            figures[model] = measure(arguments, model, place)
        print(model, figures[model], file=sys.stderr)
    report(figures, arguments)


if __name__ == "__main__":
    main()
