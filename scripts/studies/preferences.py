"""What preferences teach, beside learning the chosen answers alone: three tasks, seeds, int4 and float32.

    python scripts/studies/preferences.py --story-model BABYLLAMA --out preferences

    shorter   of two sentences that the story model wrote itself after a prompt, the shorter one is chosen
    manner    an answer in a manner (style.py) is chosen, a sentence of the model's own rejected
    moods     the right mood of the demo's texts is chosen, the wrong one rejected; by the demo's model

Each is `prge tune` with its defaults but for the steps, with `--objective dpo` and `completion`, and with
what `--objectives` names. Development rows choose rate and step, test rows are read once. Prints JSON,
by task, weights and objective:

    wanted          share of the test rows' answers that are as wanted: shorter than a sentence that the start
                    model draws, in the manner, or the right mood; `before` has that of the model as it was
    pairs_right     share of test pairs whose chosen answer gained more than the rejected one
    chosen_change, rejected_change
                    of the log-probability of a test answer
    characters      of an answer, a mean
    rate, seconds   the learning rate that was found, and the seconds of all of it
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from style import BEFORE, MANNER, make_rows
from tune import tune
from verbs import DEMO, answers, made, make_parser, report, scored, summarize, write_rows

import prge
from prge.data.forms.task import load_task
from prge.data.readers.files import read_rows

COUNTS = {"train": 200, "dev": 60, "test": 100}
SCHEMES = ("fp32", "8da4w")
SHAPE: dict[str, Any] = {"adapter": "lora", "target_modules": "all-linear", "rank": 16}
# A sentence of the story model's own.
SENTENCE: dict[str, Any] = {"max_tokens": 120, "stop": ["."]}
FIGURES = ("wanted", "characters", "pairs_right", "chosen_change", "rejected_change", "rate", "seconds")
# Beyond the seeds of the pairs.
_DRAWS = 10_000
Rows = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Read the flags, run every task, scheme, objective and seed, print JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--story-model", required=True, help="folder or hub id of babyllama")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--objectives", nargs="+", default=["dpo", "completion"])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = {
        task: {scheme: study(arguments, task, scheme) for scheme in arguments.schemes}
        for task in arguments.tasks
    }
    report(found, arguments.out)


def study(arguments: argparse.Namespace, task: str, scheme: str) -> dict[str, Any]:
    """All objectives with every seed."""
    out = arguments.out / f"{task}-{scheme}"
    model = DEMO / "model" if task == "moods" else arguments.story_model
    begin = {} if task == "moods" else {"prepend_bos": "always"}
    place = arguments.out / f"{Path(str(model)).name}-{scheme}"
    bundle = made("export", place, model=model, quantize=scheme, **SHAPE, **begin)
    rows = rows_of(arguments, task, bundle, out)
    files = {split: write_rows(out / f"{split}.jsonl", rows[split]) for split in COUNTS}
    before = behaviour(task, out, rows["test"], bundle)
    tables: dict[str, Any] = {"before": before}
    for objective in arguments.objectives:
        runs = []
        for seed in arguments.seeds:
            name = out / f"{objective}-{seed}"
            flags = {"data": files["train"], "dev": files["dev"], "bundle": bundle, "objective": objective}
            tuned = tune(name, **flags, seed=seed, steps=arguments.steps, threads=arguments.threads)
            pairs = scored(
                out / f"{name.name}-pairs.json",
                **{"bundle": bundle, "adapter": name / "run", "data": files["test"], "objective": "dpo"},
            )
            runs.append(
                {
                    "seed": seed,
                    **behaviour(task, out, rows["test"], bundle, name / "run"),
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
    """Pairs by split, kept: what a model wrote is written once."""
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "rows.json"
    if not kept.exists():
        kept.write_text(json.dumps(TASKS[task](bundle)), encoding="utf-8")
    rows: Rows = json.loads(kept.read_text(encoding="utf-8"))
    return rows


def shorter(bundle: Path) -> Rows:
    """Pairs of sentences of the model's own that differ in length."""
    write, found = _writer(bundle), Rows()
    for split, prompts in _prompts().items():
        pairs = [(each, *sorted((write(each), write(each)), key=len)) for each in prompts]
        found[split] = [
            {"prompt": prompt, "chosen": short, "rejected": long}
            for prompt, short, long in pairs
            if len(short) < len(long)
        ]
    return found


def manner(bundle: Path) -> Rows:
    """Pairs of an answer in the manner and a sentence of the model's own."""
    write = _writer(bundle)
    return {
        split: [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": write(row["prompt"])}
            for row in rows[: COUNTS[split]]
        ]
        for split, rows in make_rows().items()
    }


def moods(_: Path) -> Rows:
    """Pairs of the right and the wrong mood of a text."""
    task = load_task(str(DEMO / "task.yaml"))
    found: Rows = {}
    for split, count in COUNTS.items():
        fields = [row.fields for row in read_rows(DEMO / f"{split}.jsonl")[:count]]
        found[split] = [
            {
                "prompt": task.prompt(each),
                "chosen": task.candidates(each)[task.label(each)],
                "rejected": task.candidates(each)[1 - task.label(each)],
            }
            for each in fields
        ]
    return found


TASKS: dict[str, Callable[[Path], Rows]] = {"shorter": shorter, "manner": manner, "moods": moods}


def _prompts() -> dict[str, list[str]]:
    return {split: [row["prompt"] for row in rows[: COUNTS[split]]] for split, rows in make_rows().items()}


def _writer(bundle: Path, adapter: Path | None = None, seed: int = 0) -> Callable[[str], str]:
    """What writes a sentence after a prompt, drawn by another seed each time."""
    model, seeds = prge.load(bundle, adapter, threads=1), itertools.count(seed)

    def write(prompt: str) -> str:
        return f"{model.generate(prompt, temperature=1.0, seed=next(seeds), **SENTENCE).text}."

    return write


def behaviour(
    task: str, out: Path, rows: list[dict[str, Any]], bundle: Path, adapter: Path | None = None
) -> dict[str, float]:
    """How the model answers test prompts: drawn as the pairs were, of the manner by the likeliest tokens."""
    how = {"bundle": bundle, "data": out / "test.jsonl"}
    if task == "moods":
        name = "before" if adapter is None else adapter.parent.name
        data = {"data": DEMO / "test.jsonl", "task": DEMO / "task.yaml", "limit": COUNTS["test"]}
        found = scored(out / f"{name}-moods.json", bundle=bundle, adapter=adapter, **data)
        return {"wanted": found["accuracy"]}
    if task == "shorter":
        first = _writer(bundle, seed=_DRAWS)
        after = _writer(bundle, adapter, seed=2 * _DRAWS)
        pairs = [(len(first(row["prompt"])), len(after(row["prompt"]))) for row in rows]
        found = {"wanted": statistics.mean(new < old for old, new in pairs)}
        return {**found, "characters": statistics.mean(new for _, new in pairs)}
    names = [BEFORE if adapter is None else f"tuned={adapter}"]
    ((_, told),) = answers(**how, adapter=names, max_tokens=120).items()
    texts = [answer["text"] for answer in told]
    wanted = statistics.mean(MANNER.fullmatch(text) is not None for text in texts)
    return {"wanted": wanted, "characters": statistics.mean(map(len, texts))}


if __name__ == "__main__":
    main()
