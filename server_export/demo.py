"""`prge demo`: the whole path on a tiny model that comes with the package, each step a command of its own.

export -> evaluate -> run, killed on the way -> resume -> evaluate -> publish -> a table and a picture
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prge.errors import PrgeError, RunError
from prge.settings import parse_settings

DATA = Path(__file__).resolve().parent / "demo_data"
DESCRIPTION = "Export, fine-tune, evaluate and publish a tiny model on this machine, in about two minutes."

STEPS = 600
EXPORT = {
    "target-modules": ["o_proj", "down_proj"],
    "rank": 8,
    "alpha": 16,
    "roles": ["stack", "tangent"],
    "sequence-length": 32,
}
RUN = {
    "estimator": "tangent",
    "queries": 4,
    "batch-size": 4,
    "steps": STEPS,
    "optimizer": "adam",
    "learning-rate": 0.01,
    "schedule": "cosine",
    "evaluate-every": 100,
    "checkpoint-every": 50,
}


@dataclass(frozen=True)
class DemoSettings:
    """The whole path on a tiny model that comes with the package."""

    out: Path = Path("demo-output")
    """Folder for everything that the demo makes."""
    json: Path | None = None
    """File to write the figures to as JSON."""
    seed: int = 42
    """Seed of the run."""
    quantize: str = "fp32"
    """Frozen weights: fp32, 8da8w or 8da4w."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge demo --help`."""
    settings = parse_settings(DemoSettings, argv, "prge demo", description=DESCRIPTION)
    figures = demo(settings)
    if settings.json:
        settings.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def demo(settings: DemoSettings) -> dict[str, Any]:
    """Run every step; returns accuracies on test rows, seconds, the driver's peak memory.

    Raises:
        RunError: the output folder holds something already.
        PrgeError: a step failed; its own message is on the terminal.
    """
    out = settings.out
    if out.exists() and any(out.iterdir()):
        raise RunError(f"{out} is not empty", remedy="remove it, or give another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    bundle, run = out / "bundle", out / "run"
    task = ["--task", DATA / "task.yaml"]
    test = ["--bundle", bundle, "--data", DATA / "test.jsonl", *task]
    _step("1/6  export the model into a bundle")
    quantize = ["--quantize", settings.quantize]
    _prge("export", "--model", DATA / "model", "--out", bundle, *_flags(EXPORT), *quantize)
    _step("2/6  score it on test rows: it has never seen this task")
    before = _evaluate(out / "before.json", *test)
    _step("3/6  fine-tune it by forward passes alone, and kill the process on the way")
    data = ["--train", DATA / "train.jsonl", "--dev", DATA / "dev.jsonl", *task]
    _killed_on_the_way(run, "--bundle", bundle, "--out", run, *data, *_flags(RUN), "--seed", settings.seed)
    _step("4/6  resume it from its journal")
    _prge("run", "--resume", run)
    _step("5/6  score it on test rows again")
    after = _evaluate(out / "after.json", *test, "--adapter", run)
    _step("6/6  publish the adapter for PEFT, and draw the curve")
    _prge("publish", run, "--bundle", bundle, "--model", DATA / "model", "--out", out / "adapter")
    _prge("plot", run, "--out", out / "curve.png")
    summary = json.loads((run / "run.json").read_text())
    figures = {
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "loss_before": before["loss"],
        "loss_after": after["loss"],
        "seconds": time.perf_counter() - begin,
        "training_seconds": summary["train"]["seconds"],
        "peak_rss_mb": (summary["train"]["memory"]["peak_bytes"] or 0) / 1e6 or None,
        "rows_forwarded": summary["train"]["rows"],
        "trained_values": summary["train"]["trained_values"],
        "resumed": summary["run"]["status"] == "completed" and summary["train"]["steps"] == STEPS,
    }
    print(_table(figures, out))
    return figures


def _prge(*words: object) -> None:
    """Run one verb in a process of its own, as a user would."""
    command = [sys.executable, "-m", "prge.cli", *map(str, words)]
    print("$ prge " + " ".join(map(str, words)), flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        what = f"`prge {words[0]}` ended with code {code}"
        raise PrgeError(what, remedy="its message is above; `prge doctor` may tell more")


def _evaluate(path: Path, *words: object) -> dict[str, Any]:
    _prge("eval", *words, "--json", path)
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _killed_on_the_way(run: Path, *words: object) -> None:
    """Start a run and kill it, as a phone would, when two fifths of its steps are taken."""
    command = [sys.executable, "-m", "prge.cli", "run", *map(str, words)]
    print("$ prge run " + " ".join(map(str, words)), flush=True)
    journal = run / "journal.jsonl"
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            if journal.is_file() and journal.read_bytes().count(b'"kind":"step"') >= 0.4 * STEPS:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.05)
    if process.returncode != -signal.SIGKILL:
        raise PrgeError(f"`prge run` ended with code {process.returncode}", remedy="its message is above")
    print(f"killed process {process.pid} with SIGKILL")


def _flags(settings: dict[str, Any]) -> list[str]:
    words = []
    for name, value in settings.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def _step(text: str) -> None:
    print(f"\n{text}", flush=True)


def _table(figures: dict[str, Any], out: Path) -> str:
    rows = [
        ("accuracy on test rows", f"{figures['accuracy_before']:.1%}", f"{figures['accuracy_after']:.1%}"),
        ("loss on test rows", f"{figures['loss_before']:.3f}", f"{figures['loss_after']:.3f}"),
    ]
    lines = ["", f"{'':<24}{'before':>10}{'after':>10}"]
    lines += [f"{name:<24}{before:>10}{after:>10}" for name, before, after in rows]
    lines += [
        "",
        f"trained values          {figures['trained_values']:>10,}",
        f"rows forwarded          {figures['rows_forwarded']:>10,}",
        f"seconds of training     {figures['training_seconds']:>10.1f}",
        f"seconds in all          {figures['seconds']:>10.1f}",
        f"peak memory of the run  {figures['peak_rss_mb']:>7.0f} MB",
        "",
        f"curve:    {out / 'curve.png'}",
        f"adapter:  {out / 'adapter'} (loads with peft.PeftModel.from_pretrained)",
    ]
    return "\n".join(lines)
