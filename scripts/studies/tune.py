"""`prge tune` with its defaults on six tasks, against a grid of learning rates and against PyTorch.

    python scripts/studies/tune.py --story-model BABYLLAMA --encoder MINILM --texts wikitext.json \
        --sst2 SST2_FOLDER --out results

For each task and seed `prge tune` is told the model and the rows alone; and once more with
`--adapter lora-fa`. Then, with the settings that the first decided, rows and steps alike, but with every
learning rate of a grid: the engine's own runs, and PyTorch with PEFT's layers, LoRA (both matrices) and
LoRA-FA, from the same start.
A grid goes by factors of three outward from its middle until the best rate on development rows has a worse
neighbour on both sides; it is walked with the first seed, the others take its best rate. Test rows are read
once for each result. `--ways` leaves ways out.

Prints JSON, by task: losses (and accuracies) of the test rows `before`, by `prge tune` (`tuned`,
`tuned-fa`), by the engine's `grid`, by `lora-fa` and `lora` in PyTorch; rates, seconds, memory.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import style
import yaml
from questions import make_questions
from verbs import DEMO, made, make_parser, prge, report, scored, summarize, trained, write_rows

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
WAYS = (*TUNED, "grid", *PYTORCH)


def main() -> None:
    """Read the flags, run every task and seed, print JSON."""
    parser = with_data(make_parser(__doc__))
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report({name: study(arguments, name) for name in arguments.tasks}, arguments.out)


def with_data(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser that also asks for models and data sets."""
    parser.add_argument("--story-model", required=True, help="folder or hub id of babyllama")
    parser.add_argument("--encoder", required=True, help="folder or hub id of all-MiniLM-L6-v2")
    parser.add_argument("--texts", type=Path, required=True, help="JSON list of passages")
    parser.add_argument("--sst2", type=Path, required=True, help="folder of SST-2's tsv files")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def rows_of(arguments: argparse.Namespace, name: str) -> dict[str, list[Any]]:
    """Rows of a task by split."""
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
    """A part of SST-2."""
    return [
        dict(row.fields) for row in select_rows(read_rows(folder / f"{file}.tsv"), Selection(start, count, 0))
    ]


def _messages(row: dict[str, str]) -> dict[str, Any]:
    turns = (("user", row["prompt"]), ("assistant", row["completion"].strip()))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def told(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """What `prge tune` is told of a task: the model and the rows."""
    if name == "candidates":
        rows = {"data": DEMO / "train.jsonl", "dev": DEMO / "dev.jsonl", "test": DEMO / "test.jsonl"}
        return {"model": DEMO / "model", "task": DEMO / "task.yaml", **rows}
    is_encoder = name in ENCODER_TASKS
    model = arguments.encoder if is_encoder else arguments.story_model
    files = written(arguments.out, name, rows_of(arguments, name))
    return {"model": model, "task": ENCODER_TASKS.get(name), **files}


def written(folder: Path, name: str, rows: dict[str, list[Any]]) -> dict[str, Path]:
    """Files of rows, as flags of `prge tune`."""
    flags = {"data": "train", "dev": "dev", "test": "test"}
    return {flag: write_rows(folder / f"{name}-{split}.jsonl", rows[split]) for flag, split in flags.items()}


def study(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """All ways with every seed."""
    words = told(arguments, name)
    rates: dict[str, float] = {}
    runs = [compare(arguments, name, words, seed, rates) for seed in arguments.seeds]
    return summarize(runs, [name for name, value in runs[0].items() if name != "seed" and value is not None])


def compare(
    arguments: argparse.Namespace, name: str, words: dict[str, Any], seed: int, rates: dict[str, float]
) -> dict[str, Any]:
    """Figures of the test rows by all ways; `rates` holds the best of the first seed's grids."""
    out = arguments.out / f"{name}-{seed}"
    common = {"seed": seed, "threads": arguments.threads}
    figures: dict[str, Any] = {"seed": seed}
    for way in TUNED:
        if way in arguments.ways:
            found = tune(out / way, **words, **TUNED[way], **common)
            figures |= {
                **_figures("before", found["score_before"]),
                **_figures(way, found["score_after"]),
                f"{way}_rate": found["chosen"]["learning_rate"]["value"],
                f"{way}_seconds": found["seconds"],
                f"{way}_final_seconds": trained(out / way / "run")["seconds"],
                f"{way}_peak_mb": found["peak_mb"],
            }

    def run(way: str, rate: float) -> Path:
        tuned, place = out / "tuned", out / f"{way}-{rate:.3g}"
        if way == "grid":
            return made("run", place, config=tuned / "run" / "config.yaml", learning_rate=rate)
        settings = pytorch_settings(tuned, read_json(out / "tuned.json"))
        same = {**common, **settings, "model": words["model"], "task": words["task"]}
        return made("baseline", place, method=PYTORCH[way], learning_rate=rate, **same)

    for way in ("grid", *PYTORCH):
        if way not in arguments.ways:
            continue
        tune(out / "tuned", **words, **common)
        rates[way] = rates.get(way) or walked(partial(run, way))
        best = run(way, rates[way])
        if way == "grid":
            rows = {"data": out / "tuned" / "rows" / "test.jsonl", "task": words["task"]}
            same = {"bundle": out / "tuned" / "bundle", "threads": arguments.threads}
            scores = scored(out / "grid.json", adapter=best, **same, **rows)
        else:
            scores = trained(best)["test"]
        figures |= _figures(way, scores) | {f"{way}_rate": rates[way]}
    return figures


def tune(folder: Path, **flags: Any) -> dict[str, Any]:
    """What `prge tune` tells, kept beside its folder."""
    result = folder.with_suffix(".json")
    if not result.exists():
        prge("tune", out=folder, json=result, **flags)
    return read_json(result)


def pytorch_settings(tuned: Path, found: dict[str, Any]) -> dict[str, Any]:
    """What a run in PyTorch shares with the one that `prge tune` ended with."""
    decided = yaml.safe_load((tuned / "run" / "config.yaml").read_text(encoding="utf-8"))
    alike = ("steps", "warmup", "schedule", "beta2", "select", "evaluate_every", "dev_limit")
    files = {split: tuned / "rows" / f"{split}.jsonl" for split in ("train", "dev", "test")}
    size = found["chosen"]["batch_size"]["value"]
    same = {name: decided[name] for name in alike}
    return {"bundle": tuned / "bundle", "batch_size": size, **files, **same}


def _figures(way: str, scores: dict[str, Any] | None) -> dict[str, Any]:
    names = ("loss", "accuracy")
    return {f"{way}_{name}": scores[name] for name in names if scores and scores.get(name) is not None}


def walked(run: Callable[[float], Path]) -> float:
    """The rate of a grid with the least loss of development rows, its neighbours tried too."""
    losses = {rate: development_loss(run, rate) for rate in MIDDLE}
    while (best := min(losses, key=losses.__getitem__)) in (min(losses), max(losses)):
        beyond = best / FACTOR if best == min(losses) else best * FACTOR
        losses[beyond] = development_loss(run, beyond)
    return best


def development_loss(run: Callable[[float], Path], rate: float) -> float:
    """Loss of development rows at the best step; infinite if the run diverged."""
    try:
        return float(trained(run(rate))["best"]["loss"])
    except subprocess.CalledProcessError:  # it diverged
        return math.inf


if __name__ == "__main__":
    main()
