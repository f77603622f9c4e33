"""Compare adapter settings for `prge tune`: layers, rank, `lora_a`, trained matrices and number of steps.

    python scripts/studies/adapters.py --story-model BABYLLAMA --encoder MINILM --texts wikitext.json \\
        --sst2 SST2_FOLDER --out results --tasks completions lists --variants qv-8-eva-fa default

A variant is layers (`all` linear ones, or `qv`, queries and values), rank, initialization and trained
matrices; a suffix `-x3` triples the steps; `default` is what `prge tune` does by itself. Each is a whole
`prge tune` with its own search of the learning rate; development rows choose the rate, the step and the
variant. Test rows are read once for each.

Prints JSON, by task and variant: losses and accuracies, rates, steps, CPU seconds, memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from style import ANIMALS, LOOKS, NAMES, THINGS
from tune import TASKS, add_data_flags, tune, tune_flags, write_splits
from verbs import evaluate, make_parser, report, summarize

from prge.training.estimators.table import ESTIMATORS

LINES = {"train": slice(0, 300), "dev": slice(300, 400), "test": slice(400, 600)}
COUNTS = {"train": 300, "dev": 100, "test": 200}
LAYERS = {"all": ["all-linear"], "qv": ["q_proj", "v_proj"], "qv of encoders": ["query", "value"]}
ADAPTERS = {"fa": "lora-fa", "lora": "lora"}
OLD = "qv-8-eva-fa"


def main() -> None:
    """Parse the flags, train and print JSON."""
    parser = add_data_flags(make_parser(__doc__, seeds=(42,)))
    parser.add_argument("--tasks", nargs="+", default=[*TASKS, *ROWS], choices=[*TASKS, *ROWS])
    parser.add_argument("--variants", nargs="+", default=[OLD, "default"])
    parser.add_argument("--estimator", choices=ESTIMATORS, default="exact")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report({name: study(arguments, name) for name in arguments.tasks}, arguments.out)


def study(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run all variants with every seed."""
    words = flags_of_task(arguments, name)
    tables = {}
    for variant in arguments.variants:
        runs = [tuned(arguments, words, name, variant, seed) for seed in arguments.seeds]
        tables[variant] = summarize(runs, [each for each in runs[0] if each != "seed"])
    return tables


def flags_of_task(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the flags of `prge tune` for a task: the model and the rows."""
    if name in TASKS:
        return tune_flags(arguments, name)
    rows = ROWS[name](arguments)
    return {"model": arguments.story_model, **write_splits(arguments.out, name, rows)}


def lines(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the beginnings of WikiText's passages."""
    passages = json.loads(arguments.texts.read_text(encoding="utf-8"))
    return {split: [{"text": text[:96]} for text in passages[part]] for split, part in LINES.items()}


def sums(rng: random.Random) -> dict[str, str]:
    """Return a story with a sum of two numbers."""
    first, second = rng.randint(1, 9), rng.randint(1, 9)
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    prompt = f"{name} had {first} {thing}s and got {second} more. Now {name} has"
    return {"prompt": prompt, "completion": f" {first + second} {thing}s."}


def lists(rng: random.Random) -> dict[str, str]:
    """Return a list of words, reversed or without its first word."""
    words = rng.sample([*ANIMALS, *THINGS], rng.randint(2, 4))
    call, result = rng.choice([("reverse", words[::-1]), ("rest", words[1:])])
    return {"prompt": f"{call}({', '.join(words)}):", "completion": f" ({', '.join(result)})"}


def talk(rng: random.Random) -> dict[str, Any]:
    """Return a conversation of two turns about things and their looks."""
    messages = []
    for look in rng.sample(LOOKS, 2):
        name, thing, animal = rng.choice(NAMES), rng.choice(THINGS), rng.choice(ANIMALS)
        prompt = f"{name} gave the {animal} a {look} {thing}."
        answer = f"So the {animal} has a {thing} now. It is {look}."
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def make_unique_rows(make: Callable[[random.Random], Any], _: argparse.Namespace) -> dict[str, list[Any]]:
    """Return rows by split without duplicates."""
    rng = random.Random(7)
    results: dict[str, Any] = {}
    while len(results) < sum(COUNTS.values()):
        row = make(rng)
        results.setdefault(json.dumps(row), row)
    rows = iter(results.values())
    return {split: list(itertools.islice(rows, count)) for split, count in COUNTS.items()}


def parts_of(variant: str, is_encoder: bool) -> tuple[list[str], int, str, str, int]:
    """Return layers, rank, initialization, trained matrices, and the factor of steps."""
    layers, rank, init, adapter_type, *factor = variant.split("-")
    layer_names = "qv of encoders" if layers == "qv" and is_encoder else layers
    return LAYERS[layer_names], int(rank), init, ADAPTERS[adapter_type], int(factor[0][1:]) if factor else 1


def tuned(
    arguments: argparse.Namespace, words: dict[str, Any], name: str, variant: str, seed: int
) -> dict[str, Any]:
    """Return the figures of one tuning, which doesn't see test rows."""
    out = arguments.out / name / f"{variant}-{seed}"
    out.parent.mkdir(parents=True, exist_ok=True)
    flags = {flag: value for flag, value in words.items() if flag != "test"}
    flags |= {"seed": seed, "threads": arguments.threads, "estimator": arguments.estimator}
    if variant != "default":
        layers, rank, init, adapter_type, factor = parts_of(variant, words["model"] == arguments.encoder)
        flags |= {"target_modules": layers, "rank": rank, "init": init, "adapter": adapter_type}
        if factor > 1:
            base_run = tuned(arguments, words, name, variant.rpartition("-")[0], seed)
            flags["steps"] = factor * base_run["steps"]
    with measure_seconds(out.with_name(f"{out.name}-seconds.json")) as seconds:
        results = tune(out, **flags)
    rows = {"data": words["test"], "task": words.get("task"), "threads": arguments.threads}
    scores = evaluate(
        out.with_name(f"{out.name}-test.json"), bundle=out / "bundle", adapter=out / "run", **rows
    )
    return {
        "seed": seed,
        "dev_loss": results["score_after"]["loss"],
        **{f"test_{key}": scores[key] for key in ("loss", "accuracy") if scores.get(key) is not None},
        "rate": results["chosen"]["learning_rate"]["value"],
        "steps": results["chosen"]["steps"]["value"],
        "final_step": results["final_step"],
        "seconds": seconds(),
        "peak_mb": results["peak_mb"],
    }


@contextmanager
def measure_seconds(file: Path) -> Iterator[Callable[[], float]]:
    """Measure CPU seconds of child processes and keep them in a file."""

    def children_seconds() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    before = children_seconds()
    yield lambda: float(json.loads(file.read_text(encoding="utf-8")))
    if not file.exists():
        file.write_text(json.dumps(children_seconds() - before), encoding="utf-8")


ROWS: dict[str, Callable[[argparse.Namespace], dict[str, list[Any]]]] = {
    "lines": lines,
    **{make.__name__: partial(make_unique_rows, make) for make in (sums, lists, talk)},
}

if __name__ == "__main__":
    main()
