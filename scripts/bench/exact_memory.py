"""Memory of exact steps: backpropagation with one block's weights at a time, by model.

    python scripts/bench/exact_memory.py --models qwen2.5-0.5b gemma3-1b --json memory.json
    python scripts/bench/exact_memory.py --models tinyllama-1.1b --batch-size 4 --seq-len 64 --steps 20 \\
        --limit-mb 256

A model is an architecture with random weights. It is exported; a `prge run` packs its weights; another one
takes steps on rows of random letters, with the least `--memory`, and is what is measured, from its
start to its end. The system has forgotten all files before. Prints JSON by model: `anonymous_mb`, the most
that no file could give back, `peak_rss_mb` (VmHWM), pages of mapped files with it, `step_seconds`, the
median, `major_faults`, `read_mb` from the storage, the same of the first run with its children as
`packing_...`, and what the export took. With `--limit-mb` the steps are taken again, as `limited`, in a
control group whose memory ends there, pages of files with it; `group_peak_mb` is the most that it had. That
needs the right to make control groups.
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

from processes import forget
from reports import parser_of, report_models
from timing import export

from prge.cli.subprocesses import verb_command
from prge.formats.bundle import open_bundle
from prge.formats.run_folder import read_metrics
from prge.formats.signatures import BACKWARD
from prge.system.processes import watch_memory
from prge.training.costs import minimum_memory

# By version of control groups: where they are, the files of the limit and of the most that was taken.
GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
)


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Export a model, pack it, take steps."""
    flags = ["--quantize", arguments.quantize, "--rank", arguments.rank, "--roles", "forward", "backward"]
    flags += ["--target-modules", *arguments.target_modules] if arguments.target_modules else []
    flags += ["--sequence-length", arguments.seq_len]
    exported = export(folder / "model", folder / "bundle", *flags)
    shutil.rmtree(folder / "model")
    write_rows(folder / "rows.jsonl", 4 * arguments.batch_size, arguments.seq_len)
    packing = run(arguments, folder, steps=1)
    found: dict[str, Any] = run(arguments, folder, arguments.steps)
    if arguments.limit_mb:
        found["limited"] = run(arguments, folder, arguments.steps, arguments.limit_mb << 20)
    return {
        **found,
        **{f"packing_{name}": value for name, value in packing.items()},
        **{f"export_{name}": value for name, value in exported.items()},
    }


def write_rows(path: Path, count: int, tokens: int) -> None:
    """Rows of random letters, a token each."""
    letters = random.Random(0)
    texts = ("".join(letters.choices(string.ascii_letters, k=tokens)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def run(arguments: argparse.Namespace, place: Path, steps: int, limit: int | None = None) -> dict[str, float]:
    """What a `prge run` of its own takes, with cold files and the least memory for weights."""
    shutil.rmtree(place / "run", ignore_errors=True)
    forget(place)
    words = ["run", "--estimator", "exact", "--quiet", "--threads", arguments.threads, "--steps", steps]
    words += ["--bundle", place / "bundle", "--train", place / "rows.jsonl", "--out", place / "run"]
    least = minimum_memory(open_bundle(place / "bundle"), BACKWARD, arguments.batch_size, arguments.seq_len)
    words += ["--memory", least, "--batch-size", arguments.batch_size]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    begin, found = time.monotonic(), dict[str, float]()
    with ExitStack() as stack:
        command = verb_command(*words)
        if limit is not None:
            processes, most = stack.enter_context(group(limit))
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(processes), *command]
        process = subprocess.Popen(command, stdout=sys.stderr, env=environment)
        with watch_memory(process.pid) as peak:
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"prge run ended with code {os.waitstatus_to_exitcode(status)}")
        if limit is not None:
            found["group_peak_mb"] = int(most.read_text(encoding="ascii")) / 1e6
    return {
        **asdict(peak),
        **found,
        "step_seconds": step_seconds(place / "run"),
        "seconds": time.monotonic() - begin,
        "major_faults": usage.ru_majflt,
        "read_mb": usage.ru_inblock * 512 / 1e6,
    }


@contextmanager
def group(limit: int) -> Iterator[tuple[Path, Path]]:
    """A control group with so much memory: its files that take processes, and tell the most that it had."""
    root, most, peak = next(known for known in GROUPS if (known[0] / "cgroup.procs").exists())
    folder = root / f"prge-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / most).write_text(str(limit), encoding="ascii")
        yield folder / "cgroup.procs", folder / peak
    finally:
        folder.rmdir()


def step_seconds(run: Path) -> float:
    """The median over the steps of a run."""
    taken = [record for record in read_metrics(run) if record["event"] == "step"]
    return float(statistics.median(record["engine_seconds"] + record["host_seconds"] for record in taken))


def main() -> None:
    """Read the flags, measure model after model, print JSON."""
    shape = {"rank": 16, "batch_size": 1, "seq_len": 256, "steps": 4, "threads": 2}
    parser = parser_of(__doc__, models=["qwen2.5-0.5b"], quantize="8da4w", **shape)
    parser.add_argument("--target-modules", nargs="*", help="by default PEFT's choice: query and value")
    parser.add_argument("--limit-mb", type=int, help="of a control group, in units of 2^20 bytes")
    report_models(parser.parse_args(), bench)


if __name__ == "__main__":
    main()
