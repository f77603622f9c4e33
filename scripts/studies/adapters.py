"""What `prge tune` should adapt and start from: layers, rank, `lora_a`, what is trained, number of steps.

    python scripts/studies/adapters.py --story-model BABYLLAMA --encoder MINILM --texts wikitext.json \
        --sst2 SST2_FOLDER --out results --tasks completions lists --variants qv-8-eva-fa default

A variant is layers (`all` linear ones, or `qv`, queries and values), rank, start and what is trained; `-x3`
behind it gives three times as many steps; `default` is what `prge tune` does by itself. Each is a whole
`prge tune`, with a search of the learning rate of its own; development rows choose the rate, the step and the
variant. Test rows are read once for each.

Prints JSON, by task and variant: losses and accuracies, rates, steps, the processor's seconds, memory.
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
from tune import TASKS, told, tune, with_data, written
from verbs import make_parser, report, scored, summarize

from prge.training.estimators.table import ESTIMATORS

LINES = {"train": slice(0, 300), "dev": slice(300, 400), "test": slice(400, 600)}
COUNTS = {"train": 300, "dev": 100, "test": 200}
LAYERS = {"all": ["all-linear"], "qv": ["q_proj", "v_proj"], "qv of encoders": ["query", "value"]}
ADAPTERS = {"fa": "lora-fa", "lora": "lora"}
OLD = "qv-8-eva-fa"


def main() -> None:
    """Read the flags, train, print JSON."""
    parser = with_data(make_parser(__doc__, seeds=(42,)))
    parser.add_argument("--tasks", nargs="+", default=[*TASKS, *ROWS], choices=[*TASKS, *ROWS])
    parser.add_argument("--variants", nargs="+", default=[OLD, "default"])
    parser.add_argument("--estimator", choices=ESTIMATORS, default="exact")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report({name: study(arguments, name) for name in arguments.tasks}, arguments.out)


def study(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """All variants with every seed."""
    words = words_of(arguments, name)
    tables = {}
    for variant in arguments.variants:
        runs = [tuned(arguments, words, name, variant, seed) for seed in arguments.seeds]
        tables[variant] = summarize(runs, [each for each in runs[0] if each != "seed"])
    return tables


def words_of(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """What `prge tune` is told of a task: the model and the rows."""
    if name in TASKS:
        return told(arguments, name)
    rows = ROWS[name](arguments)
    return {"model": arguments.story_model, **written(arguments.out, name, rows)}


def lines(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """The beginnings of WikiText's passages."""
    passages = json.loads(arguments.texts.read_text(encoding="utf-8"))
    return {split: [{"text": text[:96]} for text in passages[part]] for split, part in LINES.items()}


def sums(chance: random.Random) -> dict[str, str]:
    """A story with a sum of two numbers."""
    first, second = chance.randint(1, 9), chance.randint(1, 9)
    name, thing = chance.choice(NAMES), chance.choice(THINGS)
    prompt = f"{name} had {first} {thing}s and got {second} more. Now {name} has"
    return {"prompt": prompt, "completion": f" {first + second} {thing}s."}


def lists(chance: random.Random) -> dict[str, str]:
    """A list of words, turned round or without its first one."""
    words = chance.sample([*ANIMALS, *THINGS], chance.randint(2, 4))
    call, result = chance.choice([("reverse", words[::-1]), ("rest", words[1:])])
    return {"prompt": f"{call}({', '.join(words)}):", "completion": f" ({', '.join(result)})"}


def talk(chance: random.Random) -> dict[str, Any]:
    """Two turns about things and their looks."""
    messages = []
    for look in chance.sample(LOOKS, 2):
        name, thing, animal = chance.choice(NAMES), chance.choice(THINGS), chance.choice(ANIMALS)
        asked = f"{name} gave the {animal} a {look} {thing}."
        answer = f"So the {animal} has a {thing} now. It is {look}."
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def fresh(make: Callable[[random.Random], Any], _: argparse.Namespace) -> dict[str, list[Any]]:
    """Rows by split, no two of them equal."""
    chance = random.Random(7)
    found: dict[str, Any] = {}
    while len(found) < sum(COUNTS.values()):
        row = make(chance)
        found.setdefault(json.dumps(row), row)
    rows = iter(found.values())
    return {split: list(itertools.islice(rows, count)) for split, count in COUNTS.items()}


def parts_of(variant: str, is_encoder: bool) -> tuple[list[str], int, str, str, int]:
    """Layers, rank, start, what is trained, and how many times as many steps."""
    layers, rank, init, kind, *longer = variant.split("-")
    where = "qv of encoders" if layers == "qv" and is_encoder else layers
    return LAYERS[where], int(rank), init, ADAPTERS[kind], int(longer[0][1:]) if longer else 1


def tuned(
    arguments: argparse.Namespace, words: dict[str, Any], name: str, variant: str, seed: int
) -> dict[str, Any]:
    """Figures of one tuning, which knows nothing of test rows."""
    out = arguments.out / name / f"{variant}-{seed}"
    out.parent.mkdir(parents=True, exist_ok=True)
    flags = {flag: value for flag, value in words.items() if flag != "test"}
    flags |= {"seed": seed, "threads": arguments.threads, "estimator": arguments.estimator}
    if variant != "default":
        layers, rank, init, kind, longer = parts_of(variant, words["model"] == arguments.encoder)
        flags |= {"target_modules": layers, "rank": rank, "init": init, "adapter": kind}
        if longer > 1:
            usual = tuned(arguments, words, name, variant.rpartition("-")[0], seed)
            flags["steps"] = longer * usual["steps"]
    with told_seconds(out.with_name(f"{out.name}-seconds.json")) as seconds:
        found = tune(out, **flags)
    rows = {"data": words["test"], "task": words.get("task"), "threads": arguments.threads}
    scores = scored(
        out.with_name(f"{out.name}-test.json"), bundle=out / "bundle", adapter=out / "run", **rows
    )
    return {
        "seed": seed,
        "dev_loss": found["score_after"]["loss"],
        **{f"test_{key}": scores[key] for key in ("loss", "accuracy") if scores.get(key) is not None},
        "rate": found["chosen"]["learning_rate"]["value"],
        "steps": found["chosen"]["steps"]["value"],
        "final_step": found["final_step"],
        "seconds": seconds(),
        "peak_mb": found["peak_mb"],
    }


@contextmanager
def told_seconds(kept: Path) -> Iterator[Callable[[], float]]:
    """Processor seconds of the children that end meanwhile, kept in a file."""

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    before = used()
    yield lambda: float(json.loads(kept.read_text(encoding="utf-8")))
    if not kept.exists():
        kept.write_text(json.dumps(used() - before), encoding="utf-8")


ROWS: dict[str, Callable[[argparse.Namespace], dict[str, list[Any]]]] = {
    "lines": lines,
    **{make.__name__: partial(fresh, make) for make in (sums, lists, talk)},
}

if __name__ == "__main__":
    main()
