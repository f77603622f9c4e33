"""`prge demo`: the whole path on a tiny model that comes with the package, each step a command of its own.

export -> evaluate -> run, killed on the way -> resume -> evaluate -> write -> publish -> a table, a picture
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
from prge.rows.readers import read_rows
from prge.rows.task import load_task
from prge.settings import parse_settings

DATA = Path(__file__).resolve().parent / "demo_data"
DESCRIPTION = "Export, fine-tune, evaluate and publish a tiny model on this machine, in about two minutes."

EXPORT = {
    "target-modules": ["o_proj", "down_proj"],
    "rank": 8,
    "alpha": 16,
    "sequence-length": 32,
}
RUN = {"batch-size": 4, "optimizer": "adam", "schedule": "cosine", "evaluate-every": 100}
METHODS: dict[str, dict[str, Any]] = {
    "p-rge": {"estimator": "antithetic", "queries": 4, "steps": 600, "learning-rate": 0.01},
    "tangent": {"estimator": "tangent", "queries": 4, "steps": 600, "learning-rate": 0.01},
    "exact": {"estimator": "exact", "steps": 200, "learning-rate": 0.01},
}
# Candidates are compared with each other. To write the right one, the model learns it as a text, and its end.
WRITING = {"estimator": "exact", "steps": 300, "learning-rate": 0.01, "evaluate-every": 0, "sample-every": 0}


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
    """Run every step; returns accuracies on test rows, and of every method rows, seconds, peak memory.

    Raises:
        RunError: the output folder holds something already.
        PrgeError: a step failed; its own message is on the terminal.
    """
    out = settings.out
    if out.exists() and any(out.iterdir()):
        raise RunError(f"{out} is not empty", remedy="remove it, or give another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    bundle, exact = out / "bundle", out / "exact"
    task = ["--task", DATA / "task.yaml"]
    test = ["--bundle", bundle, "--data", DATA / "test.jsonl", *task]
    _step("1/6  export the model into a bundle")
    quantize = ["--quantize", settings.quantize]
    _prge("export", "--model", DATA / "model", "--out", bundle, *_flags(EXPORT), *quantize)
    _step("2/6  score it on test rows: it has never seen this task")
    before = _evaluate(out / "before.json", *test)
    _step("3/6  fine-tune it three times; one process is killed on the way, and its run goes on")
    data = ["--train", DATA / "train.jsonl", "--dev", DATA / "dev.jsonl", *task]
    for name, method in METHODS.items():
        words = ["--bundle", bundle, "--out", out / name, *data, *_flags(RUN | method)]
        words += ["--seed", settings.seed]
        if name == "tangent":
            _killed_on_the_way(out / name, method["steps"], *words)
            _prge("run", "--resume", out / name)
        else:
            _prge("run", *words)
    _step("4/6  score all on test rows")
    methods = {name: _figures(out, name, *test) for name in METHODS}
    _step("5/6  teach it to write its answer, and ask it before and after")
    samples = _written(out, bundle, settings.seed)
    _step("6/6  publish an adapter for PEFT, and draw the curves")
    _prge("publish", exact, "--bundle", bundle, "--model", DATA / "model", "--out", out / "adapter")
    _prge("plot", *(out / name for name in METHODS), "--out", out / "curve.png")
    figures = {
        "accuracy_before": before["accuracy"],
        "loss_before": before["loss"],
        "methods": methods,
        "samples": samples,
        "seconds": time.perf_counter() - begin,
    }
    print(_table(figures, out))
    return figures


def _figures(out: Path, name: str, *test: object) -> dict[str, Any]:
    """What a finished run cost, and what its adapter scores."""
    run = out / name
    after = _evaluate(out / f"{name}.json", *test, "--adapter", run)
    summary = json.loads((run / "run.json").read_text())
    return {
        "accuracy_after": after["accuracy"],
        "loss_after": after["loss"],
        "rows": summary["train"]["rows"],
        "seconds": summary["train"]["seconds"],
        "peak_rss_mb": (summary["train"]["memory"]["peak_bytes"] or 0) / 1e6 or None,
        "steps": summary["train"]["steps"],
        "trained_values": summary["train"]["trained_values"],
        "completed": summary["run"]["status"] == "completed",
    }


def _written(out: Path, bundle: Path, seed: int) -> dict[str, Any]:
    """What the model writes after a text of each class that it never saw, before and after a run."""
    task = load_task(DATA / "task.yaml")
    rows = [row.fields for row in read_rows(DATA / "train.jsonl")]
    answers = [
        {"prompt": task.prompt(row), "completion": task.candidates(row)[task.label(row)]} for row in rows
    ]
    unseen = {task.label(row.fields): row.fields for row in read_rows(DATA / "test.jsonl")}
    prompts = [{"prompt": task.prompt(row)} for row in unseen.values()]
    for name, lines in (("answers", answers), ("prompts", prompts)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--bundle", bundle, "--train", out / "answers.jsonl", "--out", out / "writing", "--seed", seed]
    _prge("run", *words, *_flags(RUN | WRITING), "--sample-prompts", out / "prompts.jsonl")
    summary = json.loads((out / "writing" / "run.json").read_text())
    samples: dict[str, Any] = summary["train"]["samples"]
    return samples


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


def _killed_on_the_way(run: Path, steps: int, *words: object) -> None:
    """Start a run and kill it, as a phone would, when two fifths of its steps are taken."""
    command = [sys.executable, "-m", "prge.cli", "run", *map(str, words)]
    print("$ prge run " + " ".join(map(str, words)), flush=True)
    journal = run / "journal.jsonl"
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            if journal.is_file() and journal.read_bytes().count(b'"kind":"step"') >= 0.4 * steps:
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
    lines = [
        "",
        f"before    {figures['accuracy_before']:>47.1%} of test rows right",
        "",
        f"{'':<10}{'steps':>9}{'rows':>10}{'seconds':>10}{'memory':>10}{'accuracy':>10}",
    ]
    for name, found in figures["methods"].items():
        memory = f"{found['peak_rss_mb'] or 0:.0f} MB"
        lines.append(
            f"{name:<10}{found['steps']:>9,}{found['rows']:>10,}{found['seconds']:>10.1f}{memory:>10}"
            f"{found['accuracy_after']:>10.1%}"
        )
    for before, after in zip(*figures["samples"].values(), strict=True):
        lines += [
            "",
            before["prompt"],
            f"  before: {before['text'].strip()}",
            f"  after:  {after['text'].strip()}",
        ]
    lines += [
        "",
        f"seconds in all: {figures['seconds']:.1f}",
        f"curves:   {out / 'curve.png'}",
        f"adapter:  {out / 'adapter'} (loads with peft.PeftModel.from_pretrained)",
    ]
    return "\n".join(lines)
