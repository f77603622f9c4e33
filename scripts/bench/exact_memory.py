"""Measure the memory of exact steps: backpropagation with one block's weights at a time, by model.

    python scripts/bench/exact_memory.py --models qwen2.5-0.5b gemma3-1b --json memory.json
    python scripts/bench/exact_memory.py --models tinyllama-1.1b --batch-size 4 --seq-len 64 --steps 20 \\
        --limit-mb 256

A model is an architecture with random weights. It is exported; a `prge run` packs its weights; a second run
takes steps on rows of random letters with the minimum `--memory`, and is measured from start to end with
files outside the page cache. Prints JSON by model: `anonymous_mb`, the peak of memory that no file backs,
`peak_rss_mb` (VmHWM) with mapped pages, the median `step_seconds`, `major_faults`, `read_mb` from storage,
the same figures of the first run with its children as `packing_...`, and those of the export. With
`--limit-mb` the steps run again, as `limited`, in a control group with this much memory, including pages of
files; `group_peak_mb` is its peak. This needs permission to create control groups.
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
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from processes import drop_from_cache
from reports import make_parser, report_models
from timing import export

from prge.cli.subprocesses import verb_command
from prge.formats.bundle import open_bundle
from prge.formats.run_folder import read_metrics
from prge.formats.signatures import BACKWARD
from prge.system.processes import watch_memory
from prge.training.costs import minimum_memory

# By version of control groups: their folder, and the files of the limit and of the peak.
GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
)


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Export a model, pack its weights and take steps."""
    flags = ["--quantize", arguments.quantize, "--rank", arguments.rank, "--roles", "forward", "backward"]
    flags += ["--target-modules", *arguments.target_modules] if arguments.target_modules else []
    flags += ["--sequence-length", arguments.seq_len]
    export_figures = export(folder / "model", folder / "bundle", *flags)
    shutil.rmtree(folder / "model")
    write_rows(folder / "rows.jsonl", 4 * arguments.batch_size, arguments.seq_len)
    packing = run(arguments, folder, steps=1)
    figures: dict[str, Any] = run(arguments, folder, arguments.steps)
    if arguments.limit_mb:
        figures["limited"] = run(arguments, folder, arguments.steps, arguments.limit_mb << 20)
    return {
        **figures,
        **{f"packing_{name}": value for name, value in packing.items()},
        **{f"export_{name}": value for name, value in export_figures.items()},
    }


def write_rows(path: Path, count: int, tokens: int) -> None:
    """Write rows of random letters with one token each."""
    letters = random.Random(0)
    texts = ("".join(letters.choices(string.ascii_letters, k=tokens)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def run(
    arguments: argparse.Namespace, folder: Path, steps: int, limit: int | None = None
) -> dict[str, float]:
    """Measure a `prge run` with a cold page cache and the minimum memory for weights."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    drop_from_cache(folder)
    arguments_of_run = [
        "run",
        "--estimator",
        "exact",
        "--quiet",
        "--threads",
        arguments.threads,
        "--steps",
        steps,
    ]
    arguments_of_run += [
        "--bundle",
        folder / "bundle",
        "--train",
        folder / "rows.jsonl",
        "--out",
        folder / "run",
    ]
    minimum = minimum_memory(
        open_bundle(folder / "bundle"), BACKWARD, arguments.batch_size, arguments.seq_len
    )
    arguments_of_run += ["--memory", minimum, "--batch-size", arguments.batch_size]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    begin, figures = time.monotonic(), dict[str, float]()
    with ExitStack() as stack:
        command = verb_command(*arguments_of_run)
        if limit is not None:
            processes, peak_file = stack.enter_context(group(limit))
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(processes), *command]
        process = subprocess.Popen(command, stdout=sys.stderr, env=environment)
        with watch_memory(process.pid) as peak:
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"prge run ended with code {os.waitstatus_to_exitcode(status)}")
        if limit is not None:
            figures["group_peak_mb"] = int(peak_file.read_text(encoding="ascii")) / 1e6
    return {
        **asdict(peak),
        **figures,
        "step_seconds": step_seconds(folder / "run"),
        "seconds": time.monotonic() - begin,
        "major_faults": usage.ru_majflt,
        "read_mb": usage.ru_inblock * 512 / 1e6,
    }


@contextmanager
def group(limit: int) -> Iterator[tuple[Path, Path]]:
    """Create a control group with a memory limit; yield its files for processes and for the peak."""
    root, limit_name, peak_name = next(known for known in GROUPS if (known[0] / "cgroup.procs").exists())
    folder = root / f"prge-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / limit_name).write_text(str(limit), encoding="ascii")
        yield folder / "cgroup.procs", folder / peak_name
    finally:
        folder.rmdir()


def step_seconds(run: Path) -> float:
    """Return the median seconds of a run's steps."""
    steps = [record for record in read_metrics(run) if record["event"] == "step"]
    return float(statistics.median(record["engine_seconds"] + record["host_seconds"] for record in steps))


def main() -> None:
    """Parse the flags, measure each model and print JSON."""
    shape = {"rank": 16, "batch_size": 1, "seq_len": 256, "steps": 4, "threads": 2}
    parser = make_parser(__doc__, models=["qwen2.5-0.5b"], quantize="8da4w", **shape)
    parser.add_argument(
        "--target-modules", nargs="*", help="layers to adapt; default: PEFT's choice, query and value"
    )
    parser.add_argument("--limit-mb", type=int, help="memory limit of the control group in MiB")
    report_models(parser.parse_args(), bench)


if __name__ == "__main__":
    main()
