"""`prge demo`: the whole path on a tiny model that comes with the package, each step a command of its own.

tune, killed on the way -> resume -> guide its bundle -> two estimators more -> write -> a table, a picture
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prge.errors import PrgeError, RunError
from prge.rows.readers import read_rows
from prge.rows.task import load_task
from prge.verbs.settings import parse_settings
from server_export.verbs import flags_of, json_of, run_verb, started

DATA = Path(__file__).resolve().parent / "demo_data"
DESCRIPTION = "Tune, compare, evaluate and publish a tiny model on this machine, in about two minutes."

# One bundle for all three: directions of the rows help exact gradients alone.
MODEL = {"model": DATA / "model", "target_modules": ["o_proj", "down_proj"], "init": "random"}
RUN = {"batch_size": 4, "optimizer": "adam", "schedule": "cosine", "evaluate_every": 100}
# On the bundle, guided, and beside the run of `prge tune`, which takes exact gradients.
_FORWARD = {"queries": 8, "batch_size": 2, "steps": 200, "optimizer": "adam-norm", "learning_rate": 0.03}
METHODS: dict[str, dict[str, Any]] = {
    "p-rge": {"estimator": "antithetic", **_FORWARD},
    "tangent": {"estimator": "tangent", **_FORWARD},
}
# Candidates are compared with each other. To write the right one, the model learns it as a text, and its end.
WRITING = {"estimator": "exact", "steps": 300, "learning_rate": 0.01, "evaluate_every": 0, "sample_every": 0}
_STEPS_BEFORE_THE_KILL = 40


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
    task, tuned = {"task": DATA / "task.yaml"}, out / "tuned"
    bundle = tuned / "bundle"
    _step("1/4  tune it with one command; it is killed on the way, and goes on")
    rows = {"data": DATA / "train.jsonl", "dev": DATA / "dev.jsonl", "test": DATA / "test.jsonl"}
    shared = {"quantize": settings.quantize, "seed": settings.seed, "out": tuned}
    _killed_on_the_way(tuned / "run", "tune", *flags_of({**MODEL, **rows, **task, **shared}))
    run_verb("tune", "--resume", tuned, "--json", out / "tuned.json")
    found = json_of(out / "tuned.json")
    _step("2/4  train it twice more on its bundle, with forward passes alone")
    guided = out / "guided"
    shutil.copytree(bundle, guided)
    run_verb("guide", *flags_of({"bundle": guided, "model": MODEL["model"], "data": rows["data"], **task}))
    data = {"bundle": guided, "train": rows["data"], "dev": rows["dev"], **task, "seed": settings.seed}
    methods = {}
    for name, method in METHODS.items():
        run_verb("run", *flags_of({**data, **RUN, **method, "out": out / name}))
        words = {"bundle": guided, "data": rows["test"], **task, "adapter": out / name}
        run_verb("eval", *flags_of({**words, "json": out / f"{name}.json"}))
        methods[name] = _figures(out / name, json_of(out / f"{name}.json"))
    methods["exact"] = _figures(tuned / "run", found["score_after"])
    _step("3/4  teach it to write its answer, and ask it before and after")
    samples = _written(out, bundle, settings.seed)
    _step("4/4  draw the curves")
    run_verb("report", *(out / name for name in METHODS), tuned / "run", "--out", out / "report.html")
    figures = {
        "accuracy_before": found["score_before"]["accuracy"],
        "accuracy_after": found["score_after"]["accuracy"],
        "loss_before": found["score_before"]["loss"],
        "chosen": found["chosen"],
        "methods": methods,
        "samples": samples,
        "seconds": time.perf_counter() - begin,
    }
    print(_table(figures, out))
    return figures


def _figures(run: Path, score: dict[str, Any]) -> dict[str, Any]:
    """What a finished run cost, and what its adapter scores."""
    summary = json_of(run / "run.json")
    train = summary["train"]
    return {
        "accuracy_after": score["accuracy"],
        "loss_after": score["loss"],
        **{name: train[name] for name in ("rows", "seconds", "steps", "trained_values")},
        "peak_rss_mb": (train["memory"]["peak_bytes"] or 0) / 1e6 or None,
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
    words = {"bundle": bundle, "train": out / "answers.jsonl", "out": out / "writing", "seed": seed}
    run_verb("run", *flags_of({**words, **RUN, **WRITING, "sample_prompts": out / "prompts.jsonl"}))
    samples: dict[str, Any] = json_of(out / "writing" / "run.json")["train"]["samples"]
    return samples


def _killed_on_the_way(run: Path, *words: object) -> None:
    """Start a verb and kill it, and with it all that it started, as a phone would, a few steps into a run."""
    print("$ prge " + " ".join(map(str, words)), flush=True)
    journal = run / "journal.jsonl"
    with started(*words) as process:
        while process.poll() is None:
            if journal.is_file() and journal.read_bytes().count(b'"kind":"step"') >= _STEPS_BEFORE_THE_KILL:
                process.kill()
                break
            time.sleep(0.02)
    if process.returncode != -signal.SIGKILL:
        raise PrgeError(f"`prge {words[0]}` ended with code {process.returncode}", remedy="see above")
    print(f"killed process {process.pid} and its children with SIGKILL")


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
        f"report:   {out / 'report.html'}",
        f"report:   {out / 'tuned' / 'report.html'}",
        f"adapter:  {out / 'tuned' / 'adapter'} (loads with peft.PeftModel.from_pretrained)",
    ]
    return "\n".join(lines)
