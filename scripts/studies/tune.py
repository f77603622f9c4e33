"""Compare `prge tune` on six tasks with a grid of learning rates and with PyTorch.

    python scripts/studies/tune.py --story-model BABYLLAMA --encoder MINILM --texts wikitext.json \\
        --sst2 SST2_FOLDER --out results

For each task and seed `prge tune` gets only the model and the rows, and once more with `--adapter lora-fa`.
Then the settings that it chose, its rows and its steps run with every learning rate of a grid: in the engine,
and in PyTorch with PEFT's layers, LoRA (both matrices) and LoRA-FA, from the same start. A grid grows by
factors of three from its middle until the best rate on development rows has a worse neighbour on both sides;
it is searched with the first seed, and the other seeds use its best rate. Test rows are read once for each
result. `--ways` selects what is compared.

Prints JSON, by task: losses (and accuracies) of the test rows `before`, by `prge tune` (`tuned`,
`tuned-fa`), by the engine's `grid`, by `lora-fa` and `lora` in PyTorch; rates, seconds, memory.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import style
import yaml
from questions import make_questions
from verbs import (
    DEMO,
    evaluate,
    has_diverged,
    make_once,
    make_parser,
    prge,
    report,
    summarize,
    training_summary,
    write_rows,
)

from prge.cli.subprocesses import read_json
from prge.data.readers.files import Selection, read_rows, select_rows

TASKS = ("candidates", "completions", "chat", "texts", "questions", "sentences")
ENCODER_TASKS = {"questions": "trec", "sentences": "sst2"}
TEXTS = {"train": slice(0, 200), "dev": slice(800, 840), "test": slice(900, 1000)}
SENTENCES = {"train": ("train", 0, 300), "dev": ("train", 300, 100), "test": ("test-labeled", 0, 600)}
MIDDLE = (3e-3, 1e-2, 3e-2)
FACTOR = 3.0
PYTORCH = {"lora-fa": "backprop-lora-fa", "lora": "backprop-lora"}
TUNED: dict[str, dict[str, Any]] = {"tuned": {}, "tuned-fa": {"adapter": "lora-fa"}}
METHODS = (*TUNED, "grid", *PYTORCH)


def main() -> None:
    """Parse the flags, run every task and seed, and print JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--story-model", required=True, help="folder or hub id of babyllama")
    parser.add_argument("--encoder", required=True, help="folder or hub id of all-MiniLM-L6-v2")
    parser.add_argument("--texts", type=Path, required=True, help="JSON list of passages")
    parser.add_argument("--sst2", type=Path, required=True, help="folder of SST-2's tsv files")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--ways", nargs="+", default=METHODS, choices=METHODS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report({name: study(arguments, name) for name in arguments.tasks}, arguments.out)


def rows_of(arguments: argparse.Namespace, name: str) -> dict[str, list[Any]]:
    """Return the rows of a task by split."""
    match name:
        case "completions":
            return {**style.make_rows()}
        case "chat":
            return {split: [_messages(row) for row in rows] for split, rows in style.make_rows().items()}
        case "texts":
            passages = json.loads(arguments.texts.read_text(encoding="utf-8"))
            return {split: [{"text": text} for text in passages[part]] for split, part in TEXTS.items()}
        case "questions":
            return {**make_questions()}
        case _:
            return {split: sentences(arguments.sst2, *part) for split, part in SENTENCES.items()}


def sentences(folder: Path, file: str, start: int, count: int) -> list[dict[str, Any]]:
    """Return a part of SST-2."""
    return [
        dict(row.fields) for row in select_rows(read_rows(folder / f"{file}.tsv"), Selection(start, count, 0))
    ]


def _messages(row: dict[str, str]) -> dict[str, Any]:
    turns = (("user", row["prompt"]), ("assistant", row["completion"].strip()))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def tune_flags(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the flags of `prge tune` for a task: the model and the rows."""
    if name == "candidates":
        rows = {"data": DEMO / "train.jsonl", "dev": DEMO / "dev.jsonl", "test": DEMO / "test.jsonl"}
        return {"model": DEMO / "model", "task": DEMO / "task.yaml", **rows}
    is_encoder = name in ENCODER_TASKS
    model = arguments.encoder if is_encoder else arguments.story_model
    files = write_splits(arguments.out, name, rows_of(arguments, name))
    return {"model": model, "task": ENCODER_TASKS.get(name), **files}


def write_splits(folder: Path, name: str, rows: dict[str, list[Any]]) -> dict[str, Path]:
    """Write rows to files and return them as flags of `prge tune`."""
    flags = {"data": "train", "dev": "dev", "test": "test"}
    return {flag: write_rows(folder / f"{name}-{split}.jsonl", rows[split]) for flag, split in flags.items()}


def study(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Compare all methods with every seed."""
    task_flags = tune_flags(arguments, name)
    rates: dict[str, float] = {}
    runs = [compare(arguments, name, task_flags, seed, rates) for seed in arguments.seeds]
    return summarize(runs, [name for name, value in runs[0].items() if name != "seed" and value is not None])


def compare(
    arguments: argparse.Namespace, name: str, task_flags: dict[str, Any], seed: int, rates: dict[str, float]
) -> dict[str, Any]:
    """Return the figures of the test rows by all methods; `rates` holds the best rates of the first seed."""
    out = arguments.out / f"{name}-{seed}"
    common = {"seed": seed, "threads": arguments.threads}
    figures: dict[str, Any] = {"seed": seed}
    for method in TUNED:
        if method in arguments.ways:
            result = tune(out / method, **task_flags, **TUNED[method], **common)
            figures |= {
                **_figures("before", result["score_before"]),
                **_figures(method, result["score_after"]),
                f"{method}_rate": result["chosen"]["learning_rate"]["value"],
                f"{method}_seconds": result["seconds"],
                f"{method}_final_seconds": training_summary(out / method / "run")["seconds"],
                f"{method}_peak_mb": result["peak_mb"],
            }

    def run(method: str, rate: float) -> Path:
        tuned, run_folder = out / "tuned", out / f"{method}-{rate:.3g}"
        if method == "grid":
            return make_once("run", run_folder, config=tuned / "run" / "config.yaml", learning_rate=rate)
        settings = pytorch_settings(tuned, read_json(out / "tuned.json"))
        common_flags = {**common, **settings, "model": task_flags["model"], "task": task_flags["task"]}
        return make_once("baseline", run_folder, method=PYTORCH[method], learning_rate=rate, **common_flags)

    for method in ("grid", *PYTORCH):
        if method not in arguments.ways:
            continue
        tune(out / "tuned", **task_flags, **common)
        rates[method] = rates.get(method) or search_grid(partial(run, method))
        best = run(method, rates[method])
        if method == "grid":
            rows = {"data": out / "tuned" / "rows" / "test.jsonl", "task": task_flags["task"]}
            common_flags = {"bundle": out / "tuned" / "bundle", "threads": arguments.threads}
            scores = evaluate(out / "grid.json", adapter=best, **common_flags, **rows)
        else:
            scores = training_summary(best)["test"]
        figures |= _figures(method, scores) | {f"{method}_rate": rates[method]}
    return figures


def tune(folder: Path, **flags: Any) -> dict[str, Any]:
    """Run `prge tune` unless its result exists, and return the result."""
    result = folder.with_suffix(".json")
    if not result.exists():
        prge("tune", out=folder, json=result, **flags)
    return read_json(result)


def pytorch_settings(tuned: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a PyTorch run shares with the final run of `prge tune`."""
    settings = yaml.safe_load((tuned / "run" / "config.yaml").read_text(encoding="utf-8"))
    shared_names = (
        *("steps", "warmup_steps", "lr_scheduler_type", "adam_beta2"),
        *("select", "eval_steps", "dev_limit"),
    )
    files = {split: tuned / "rows" / f"{split}.jsonl" for split in ("train", "dev", "test")}
    size = result["chosen"]["batch_size"]["value"]
    common_flags = {name: settings[name] for name in shared_names}
    return {"bundle": tuned / "bundle", "batch_size": size, **files, **common_flags}


def _figures(method: str, scores: dict[str, Any] | None) -> dict[str, Any]:
    names = ("loss", "accuracy")
    return {f"{method}_{name}": scores[name] for name in names if scores and scores.get(name) is not None}


def search_grid(run: Callable[[float], Path]) -> float:
    """Return the grid's rate with the lowest loss of development rows; its neighbours were tried too."""
    losses = {rate: development_loss(run, rate) for rate in MIDDLE}
    while (best := min(losses, key=losses.__getitem__)) in (min(losses), max(losses)):
        beyond = best / FACTOR if best == min(losses) else best * FACTOR
        losses[beyond] = development_loss(run, beyond)
    return best


def development_loss(run: Callable[[float], Path], rate: float) -> float:
    """Return the loss of development rows at the best step, or infinity if the run diverged."""
    folder = run(rate)
    return math.inf if has_diverged(folder) else float(training_summary(folder)["best"]["loss"])


if __name__ == "__main__":
    main()
