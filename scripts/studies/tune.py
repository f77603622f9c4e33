"""`prge tune` with its defaults on six tasks, against a grid of learning rates and against PyTorch.

    python scripts/studies/tune.py --story-model BABYLLAMA --encoder MINILM --texts wikitext.json \
        --sst2 SST2_FOLDER --out results

For each task and seed `prge tune` is told the model and the rows alone. Then, with the settings that it
decided, rows and steps alike, but with every learning rate of a grid: the engine's own runs, and PyTorch with
PEFT's layers, LoRA (both matrices) and LoRA-FA, from the same start. A grid goes by factors of three outward
from its middle until the best rate on development rows has a worse neighbour on both sides; it is walked with
the first seed, the others take its best rate. Test rows are read once for each result.

Prints JSON, by task: losses (and accuracies) of the test rows `before`, by `prge tune` (`tuned`), by the
engine's `grid`, by `lora-fa` and `lora` in PyTorch; rates, seconds, memory.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import style
import yaml
from questions import make_questions
from verbs import DEMO, made, parser_of, prge, report, scored, summarize, trained, write_rows

from prge.rows.readers import Selection, read_rows, select_rows
from prge.verbs.starting import json_of

TEXTS = {"train": (0, 200), "dev": (800, 40), "test": (900, 100)}
SENTENCES = {"train": ("train", 300), "dev": ("train", 100), "test": ("test-labeled", 600)}
MIDDLE = (3e-3, 1e-2, 3e-2)
FACTOR = 3.0
PYTORCH = {"lora-fa": "backprop-lora-fa", "lora": "backprop-lora"}


def main() -> None:
    """Read the flags, run every task and seed, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--story-model", required=True, help="folder or hub id of babyllama")
    parser.add_argument("--encoder", required=True, help="folder or hub id of all-MiniLM-L6-v2")
    parser.add_argument("--texts", type=Path, required=True, help="JSON list of passages")
    parser.add_argument("--sst2", type=Path, required=True, help="folder of SST-2's tsv files")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--estimator", help="of prge tune and of the engine's grid; PyTorch is left out then")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report({name: study(arguments, name) for name in arguments.tasks}, arguments.out)


def candidates(arguments: argparse.Namespace) -> dict[str, Any]:
    """The demo's rows, with its own model."""
    files = {name: DEMO / f"{name}.jsonl" for name in ("train", "dev", "test")}
    return _told(DEMO / "model", files) | {"task": DEMO / "task.yaml"}


def completions(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prompts with completions in a manner."""
    return _told(arguments.story_model, _written(arguments, "completions", style.make_rows()))


def chat(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same as conversations."""
    rows = {name: [_conversation(row) for row in rows] for name, rows in style.make_rows().items()}
    return _told(arguments.story_model, _written(arguments, "chat", rows))


def texts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Passages of WikiText."""
    passages = json.loads(arguments.texts.read_text(encoding="utf-8"))
    rows = {
        name: [{"text": each} for each in passages[start : start + count]]
        for name, (start, count) in TEXTS.items()
    }
    return _told(arguments.story_model, _written(arguments, "texts", rows))


def questions(arguments: argparse.Namespace) -> dict[str, Any]:
    """Six classes, with an encoder."""
    return _told(arguments.encoder, _written(arguments, "questions", make_questions())) | {"task": "trec"}


def sentences(arguments: argparse.Namespace) -> dict[str, Any]:
    """A part of SST-2, with an encoder."""
    rows = {}
    for name, (file, count) in SENTENCES.items():
        start = SENTENCES["train"][1] if name == "dev" else 0
        picked = select_rows(read_rows(arguments.sst2 / f"{file}.tsv"), Selection(start, count, 0))
        rows[name] = [dict(row.fields) for row in picked]
    return _told(arguments.encoder, _written(arguments, "sentences", rows)) | {"task": "sst2"}


TASKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    each.__name__: each for each in (candidates, completions, chat, texts, questions, sentences)
}


def _told(model: object, files: dict[str, Path]) -> dict[str, Any]:
    return {"model": model, "data": files["train"], "dev": files["dev"], "test": files["test"]}


def _written(arguments: argparse.Namespace, name: str, rows: dict[str, list[Any]]) -> dict[str, Path]:
    return {split: write_rows(arguments.out / f"{name}-{split}.jsonl", rows[split]) for split in rows}


def _conversation(row: dict[str, str]) -> dict[str, Any]:
    turns = (("user", row["prompt"]), ("assistant", row["completion"].strip()))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def study(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """All ways with every seed."""
    words = TASKS[name](arguments)
    rates: dict[str, float] = {}
    runs = [compare(arguments, name, words, seed, rates) for seed in arguments.seeds]
    figures = [
        figure for figure in runs[0] if figure != "seed" and all(run[figure] is not None for run in runs)
    ]
    return summarize(runs, figures)


def compare(
    arguments: argparse.Namespace, name: str, words: dict[str, Any], seed: int, rates: dict[str, float]
) -> dict[str, Any]:
    """Figures of the test rows by all ways; `rates` holds the best of the first seed's grids."""
    out = arguments.out / f"{name}-{seed}"
    tuned, result = out / "tuned", out / "tuned.json"
    common = {"seed": seed, "threads": arguments.threads}
    if not result.exists():
        prge("tune", **words, out=tuned, json=result, estimator=arguments.estimator, **common)
    found = json_of(result)
    figures = {
        "seed": seed,
        **_figures("before", found["score_before"]),
        **_figures("tuned", found["score_after"]),
        "tuned_rate": found["chosen"]["learning_rate"]["value"],
        "tuned_seconds": found["seconds"],
        "final_seconds": trained(tuned / "run")["seconds"],
        "peak_mb": found["peak_mb"],
    }

    def engine(rate: float) -> Path:
        return made("run", out / f"grid-{rate:.3g}", config=tuned / "run" / "config.yaml", learning_rate=rate)

    best = rates["grid"] = rates.get("grid") or walked(engine)
    rows = {"bundle": tuned / "bundle", "data": tuned / "rows" / "test.jsonl", "task": words.get("task")}
    grid = scored(out / "grid.json", adapter=engine(best), threads=arguments.threads, **rows)
    figures |= _figures("grid", grid) | {"grid_rate": best}
    settings = {
        **common,
        **pytorch_settings(tuned, found),
        "model": words["model"],
        "task": words.get("task"),
    }
    for way, method in PYTORCH.items() if arguments.estimator is None else ():

        def pytorch(rate: float, way: str = way, method: str = method) -> Path:
            place = out / f"{way}-{rate:.3g}"
            return made("baseline", place, method=method, learning_rate=rate, **settings)

        best = rates[way] = rates.get(way) or walked(pytorch)
        figures |= _figures(way, trained(pytorch(best))["test"]) | {f"{way}_rate": best}
    return figures


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
