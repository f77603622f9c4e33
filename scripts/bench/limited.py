"""A run within less memory than its weights take: steps under a real limit against steps without one.

    python scripts/bench/limited.py --model tinyllama-1.1b --limit-mb 256 --steps 20 --json limited.json

A model has random weights; a first run packs them. Then a `prge run` with the least bound of `--memory` takes
its steps twice: as it is, and in a control group whose memory ends at the limit, pages of files with it. The
system has forgotten all files before. Prints JSON by run: `step_seconds`, the median, `anonymous_mb`,
`peak_rss_mb`, `group_peak_mb`, the most that the group had, `major_faults`, and `read_mb` from the storage.
Needs the right to make control groups.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from exact_memory import run_command, step_seconds, write_rows
from processes import forget, watched
from reports import parser_of, report
from timing import export, random_model

from server_export.model.random_models import CONFIGURATIONS

# By version of control groups: where they are, the files of the limit and of the most that was taken.
GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
)


@contextmanager
def group(limit: int | None) -> Iterator[tuple[Path, Path]]:
    """A control group with so much memory: its files that take processes, and tell the most that it had."""
    root, most, peak = next(known for known in GROUPS if (known[0] / "cgroup.procs").exists())
    folder = root / f"prge-{os.getpid()}"
    folder.mkdir()
    try:
        if limit is not None:
            (folder / most).write_text(str(limit), encoding="ascii")
        yield folder / "cgroup.procs", folder / peak
    finally:
        folder.rmdir()


def steps_within(limit: int | None, place: Path, command: Sequence[str]) -> dict[str, float]:
    """What a run takes in a group of its own, with cold files."""
    shutil.rmtree(place / "run", ignore_errors=True)
    forget(place)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    with group(limit) as (processes, most):
        words = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(processes), *command]
        process = subprocess.Popen(words, stdout=sys.stderr, env=environment)
        with watched(process.pid) as peak:
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"prge run ended with code {os.waitstatus_to_exitcode(status)}")
        return {
            "step_seconds": step_seconds(place / "run"),
            **asdict(peak),
            "group_peak_mb": int(most.read_text(encoding="ascii")) / 1e6,
            "major_faults": usage.ru_majflt,
            "read_mb": usage.ru_inblock * 512 / 1e6,
        }


def bench(arguments: argparse.Namespace, place: Path) -> dict[str, dict[str, float]]:
    """Both runs."""
    if not (place / "bundle").is_dir():
        flags = ["--quantize", arguments.quantize, "--sequence-length", str(arguments.seq_len)]
        with random_model(arguments.model, arguments.layers, place) as folder:
            export(folder / "model", place / "bundle", *flags, "--roles", "stack", "back")
    write_rows(place / "rows.jsonl", 4 * arguments.batch_size, arguments.seq_len)
    command = run_command(place, arguments.batch_size, arguments.steps, arguments.threads)
    steps_within(None, place, run_command(place, arguments.batch_size, 1, arguments.threads))
    return {
        "unlimited": steps_within(None, place, command),
        "limited": steps_within(arguments.limit_mb << 20, place, command),
    }


def main() -> None:
    """Read the flags, run, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=CONFIGURATIONS, default="tinyllama-1.1b")
    parser.add_argument("--limit-mb", type=int, default=256, help="in units of 2^20 bytes")
    parser.add_argument("--quantize", default="8da4w")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the bundle is kept, and taken from the next time")
    arguments = parser.parse_args()
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        figures = bench(arguments, arguments.folder)
    else:
        with tempfile.TemporaryDirectory() as place:
            figures = bench(arguments, Path(place))
    report(figures, arguments)


if __name__ == "__main__":
    main()
