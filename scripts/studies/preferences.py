"""Compare training on preferences with training on the chosen answers alone: three tasks, int4 and fp32.

    python scripts/studies/preferences.py --story-model BABYLLAMA --out preferences

    shorter   of two sentences that the story model wrote after a prompt, the shorter one is chosen
    manner    an answer in a style (style.py) is chosen, a sentence of the model's own rejected
    moods     the right mood of the demo's texts is chosen, the wrong one rejected; by the demo's model

Each is `prge tune` with its defaults except for the steps, with `--objective dpo` and `completion`, and with
the objectives of `--objectives`. Development rows choose rate and step, test rows are read once. Prints JSON,
by task, weights and objective:

    wanted          share of the test rows' answers that are as wanted: shorter than a sentence that the
                    original model samples, in the style, or the right mood; `before` has the share of the
                    original model
    pairs_right     share of test pairs whose chosen answer gained more than the rejected one
    chosen_change, rejected_change
                    mean change of the log-probability of a test answer
    characters      mean length of an answer
    rate, seconds   the chosen learning rate, and the total seconds
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from style import BEFORE, STYLE_PATTERN, make_rows
from tune import tune
from verbs import DEMO, answers, evaluate, make_once, make_parser, report, summarize, write_rows

import prge
from prge.data.forms.task import load_task
from prge.data.readers.files import read_rows

COUNTS = {"train": 200, "dev": 60, "test": 100}
SCHEMES = ("fp32", "8da4w")
SHAPE: dict[str, Any] = {"adapter": "lora", "target_modules": "all-linear", "rank": 16}
# Settings for one sentence of the story model.
SENTENCE: dict[str, Any] = {"max_tokens": 120, "stop": ["."]}
FIGURES = ("wanted", "characters", "pairs_right", "chosen_change", "rejected_change", "rate", "seconds")
# Offset beyond the seeds of the pairs.
_SEED_OFFSET = 10_000
Rows = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Parse the flags, run every task, scheme, objective and seed, and print JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--story-model", required=True, help="folder or hub id of babyllama")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--objectives", nargs="+", default=["dpo", "completion"])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = {
        task: {scheme: study(arguments, task, scheme) for scheme in arguments.schemes}
        for task in arguments.tasks
    }
    report(results, arguments.out)


def study(arguments: argparse.Namespace, task: str, scheme: str) -> dict[str, Any]:
    """Run all objectives with every seed."""
    out = arguments.out / f"{task}-{scheme}"
    model = DEMO / "model" if task == "moods" else arguments.story_model
    begin = {} if task == "moods" else {"prepend_bos": "always"}
    bundle_folder = arguments.out / f"{Path(str(model)).name}-{scheme}"
    bundle = make_once("export", bundle_folder, model=model, quantize=scheme, **SHAPE, **begin)
    rows = rows_of(arguments, task, bundle, out)
    files = {split: write_rows(out / f"{split}.jsonl", rows[split]) for split in COUNTS}
    before = measure_behaviour(task, out, rows["test"], bundle)
    tables: dict[str, Any] = {"before": before}
    for objective in arguments.objectives:
        runs = []
        for seed in arguments.seeds:
            name = out / f"{objective}-{seed}"
            flags = {"data": files["train"], "dev": files["dev"], "bundle": bundle, "objective": objective}
            tuned = tune(name, **flags, seed=seed, steps=arguments.steps, threads=arguments.threads)
            pairs = evaluate(
                out / f"{name.name}-pairs.json",
                **{"bundle": bundle, "adapter": name / "run", "data": files["test"], "objective": "dpo"},
            )
            runs.append(
                {
                    "seed": seed,
                    **measure_behaviour(task, out, rows["test"], bundle, name / "run"),
                    **{figure: pairs[figure] for figure in FIGURES if figure in pairs},
                    "rate": tuned["chosen"]["learning_rate"]["value"],
                    "final_step": tuned["final_step"],
                    "beta": tuned["chosen"].get("beta", {}).get("value"),
                    "seconds": tuned["seconds"],
                }
            )
        tables[objective] = summarize(runs, [figure for figure in FIGURES if figure in runs[0]])
    return tables


def rows_of(arguments: argparse.Namespace, task: str, bundle: Path, out: Path) -> Rows:
    """Return pairs by split; generated text is kept in a file."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "rows.json"
    if not file.exists():
        file.write_text(json.dumps(TASKS[task](bundle)), encoding="utf-8")
    rows: Rows = json.loads(file.read_text(encoding="utf-8"))
    return rows


def shorter(bundle: Path) -> Rows:
    """Return pairs of sentences of the model's own that differ in length."""
    write, pairs_by_split = _make_generator(bundle), Rows()
    for split, prompts in _prompts().items():
        pairs = [(each, *sorted((write(each), write(each)), key=len)) for each in prompts]
        pairs_by_split[split] = [
            {"prompt": prompt, "chosen": short, "rejected": long}
            for prompt, short, long in pairs
            if len(short) < len(long)
        ]
    return pairs_by_split


def manner(bundle: Path) -> Rows:
    """Return pairs of an answer in the style and a sentence of the model's own."""
    write = _make_generator(bundle)
    return {
        split: [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": write(row["prompt"])}
            for row in rows[: COUNTS[split]]
        ]
        for split, rows in make_rows().items()
    }


def moods(_: Path) -> Rows:
    """Return pairs of the right and the wrong mood of a text."""
    task = load_task(str(DEMO / "task.yaml"))
    pairs_by_split: Rows = {}
    for split, count in COUNTS.items():
        fields = [row.fields for row in read_rows(DEMO / f"{split}.jsonl")[:count]]
        pairs_by_split[split] = [
            {
                "prompt": task.prompt(each),
                "chosen": task.candidates(each)[task.label(each)],
                "rejected": task.candidates(each)[1 - task.label(each)],
            }
            for each in fields
        ]
    return pairs_by_split


TASKS: dict[str, Callable[[Path], Rows]] = {"shorter": shorter, "manner": manner, "moods": moods}


def _prompts() -> dict[str, list[str]]:
    return {split: [row["prompt"] for row in rows[: COUNTS[split]]] for split, rows in make_rows().items()}


def _make_generator(bundle: Path, adapter: Path | None = None, seed: int = 0) -> Callable[[str], str]:
    """Return a function that samples a sentence after a prompt, with another seed each time."""
    model, seeds = prge.load(bundle, adapter, threads=1), itertools.count(seed)

    def write(prompt: str) -> str:
        return f"{model.generate(prompt, temperature=1.0, seed=next(seeds), **SENTENCE).text}."

    return write


def measure_behaviour(
    task: str, out: Path, rows: list[dict[str, Any]], bundle: Path, adapter: Path | None = None
) -> dict[str, float]:
    """Return how the model answers test prompts: sampled as the pairs were, or greedily for `manner`."""
    flags = {"bundle": bundle, "data": out / "test.jsonl"}
    if task == "moods":
        name = "before" if adapter is None else adapter.parent.name
        data = {"data": DEMO / "test.jsonl", "task": DEMO / "task.yaml", "limit": COUNTS["test"]}
        figures = evaluate(out / f"{name}-moods.json", bundle=bundle, adapter=adapter, **data)
        return {"wanted": figures["accuracy"]}
    if task == "shorter":
        first = _make_generator(bundle, seed=_SEED_OFFSET)
        after = _make_generator(bundle, adapter, seed=2 * _SEED_OFFSET)
        pairs = [(len(first(row["prompt"])), len(after(row["prompt"]))) for row in rows]
        figures = {"wanted": statistics.mean(new < old for old, new in pairs)}
        return {**figures, "characters": statistics.mean(new for _, new in pairs)}
    names = [BEFORE if adapter is None else f"tuned={adapter}"]
    ((_, answers_of_adapter),) = answers(**flags, adapter=names, max_tokens=120).items()
    texts = [answer["text"] for answer in answers_of_adapter]
    wanted = statistics.mean(STYLE_PATTERN.fullmatch(text) is not None for text in texts)
    return {"wanted": wanted, "characters": statistics.mean(map(len, texts))}


if __name__ == "__main__":
    main()
