"""Train a small story model to answer in a fixed style, and count such answers before and after.

    python scripts/studies/style.py --model MODEL --out results

MODEL is a folder or hub id of babyllama. A prompt tells who found what, and the answer names two of its
words:

    One day, Lily and a fox found a red hat. "Oh my, a hat!" said the fox. And that was that.

A pair of animal and thing is in training, development or test rows alone, so memorized answers are wrong.
`manner` is the share of answers that match the pattern with any words, `right` the share of exact answers
that the model ended itself. Settings were chosen on development rows with seed 42; test rows are read once.
Calls the verbs export, run and generate as a user would and prints JSON.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from typing import Any

from verbs import answers, make_once, make_parser, report, summarize, training_summary, write_rows

NAMES = "Lily Tim Tom Ben Sam Max Sue Amy Jack Anna Lucy Jane".split()
ANIMALS = "cat dog fox bird bear frog duck mouse rabbit lion fish pig cow horse bee owl".split()
LOOKS = "red big little blue green shiny pretty old".split()
THINGS = "ball hat box car book boat bell cup doll drum kite leaf rock shoe stick toy".split()
PROMPT = "One day, {name} and a {animal} found a {look} {thing}."
COMPLETION = ' "Oh my, a {thing}!" said the {animal}. And that was that.'
STYLE_PATTERN = re.compile(r' "Oh my, a \w+!" said the \w+\. And that was that\.')
ROWS = {"dev": 60, "test": 100, "train": 300}
BEFORE = "base"

# babyllama was trained with a begin-of-sequence token, which its tokenizer doesn't add.
SHAPE: dict[str, Any] = {"target_modules": "all-linear", "prepend_bos": "always", "quantize": "8da4w"}
# The rate was chosen on development rows with seed 42, for each estimator.
SETTINGS: dict[str, Any] = {"steps": 600, "lr_scheduler_type": "linear", "learning_rate": 3e-3}
ESTIMATORS = ["exact", "tangent", "antithetic"]


def main() -> None:
    """Parse the flags, run every estimator and seed, and print JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--estimators", nargs="+", default=["exact"], choices=ESTIMATORS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report({estimator: study(arguments, estimator) for estimator in arguments.estimators}, arguments.out)


def make_rows() -> dict[str, list[dict[str, str]]]:
    """Return rows by split, always the same; no two splits share a pair of animal and thing."""
    rng = random.Random(0)
    pairs = [(animal, thing) for animal in ANIMALS for thing in THINGS]
    rng.shuffle(pairs)
    first, second = ROWS["dev"], ROWS["dev"] + ROWS["test"]
    parts = {"dev": pairs[:first], "test": pairs[first:second], "train": pairs[second:]}
    return {
        split: [make_row(rng, part[n % len(part)]) for n in range(ROWS[split])]
        for split, part in parts.items()
    }


def make_row(rng: random.Random, pair: tuple[str, str]) -> dict[str, str]:
    """Return a prompt about an animal and a thing, and its answer."""
    animal, thing = pair
    words = {"name": rng.choice(NAMES), "animal": animal, "look": rng.choice(LOOKS), "thing": thing}
    return {"prompt": PROMPT.format(**words), "completion": COMPLETION.format(**words)}


def study(arguments: argparse.Namespace, estimator: str) -> dict[str, Any]:
    """Train with every seed, and let the model answer before and after."""
    rows = make_rows()
    files = {split: write_rows(arguments.out / f"{split}.jsonl", each) for split, each in rows.items()}
    bundle = make_once("export", arguments.out / "bundle", model=arguments.model, **SHAPE)
    train = {"train": files["train"], "dev": files["dev"], "estimator": estimator, **SETTINGS}
    runs = {}
    for seed in arguments.seeds:
        out = arguments.out / f"{estimator}-{seed}"
        runs[seed] = make_once("run", out, bundle=bundle, seed=seed, threads=arguments.threads, **train)
    adapters = [BEFORE, *(f"{seed}={run}" for seed, run in runs.items())]
    answers_by_adapter = answers(bundle=bundle, adapter=adapters, data=files["test"])
    test = rows["test"]
    table = [
        {"seed": seed, **shares(answers_by_adapter[str(seed)], test), **costs(run)}
        for seed, run in runs.items()
    ]
    examples = zip(
        test[:3], answers_by_adapter[BEFORE], answers_by_adapter[str(arguments.seeds[0])], strict=False
    )
    return {
        "settings": SETTINGS,
        "before": shares(answers_by_adapter[BEFORE], test),
        "after": summarize(table, ("manner", "right", "seconds", "memory_mb")),
        "examples": [
            {"prompt": row["prompt"], "before": before["text"], "after": after["text"]}
            for row, before, after in examples
        ],
    }


def shares(completions: list[dict[str, Any]], rows: list[dict[str, str]]) -> dict[str, float]:
    """Return the share of answers in the style, and the share of exact answers."""
    pairs = list(zip(completions, rows, strict=True))
    return {
        "manner": sum(STYLE_PATTERN.fullmatch(answer["text"]) is not None for answer, _ in pairs) / len(rows),
        "right": sum(answer["text"] == row["completion"] for answer, row in pairs) / len(rows),
    }


def costs(run: Path) -> dict[str, Any]:
    """Return the seconds of a run with its evaluations, and its peak memory."""
    summary = training_summary(run)
    memory = summary["memory"]["peak_bytes"] / 1e6
    return {"forward_passes": summary["forward_passes"], "seconds": summary["seconds"], "memory_mb": memory}


if __name__ == "__main__":
    main()
