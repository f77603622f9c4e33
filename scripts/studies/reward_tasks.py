"""Tasks whose answers a rule can check, for reward.py: prompts for a chat model, with their rules.

    short    an instruction to answer in at most 15 words, of which small models write many more
    json     two facts in a sentence, to be written as JSON with given keys
    sum      small arithmetic in words, answered with a number

Rows of `json` and `sum` have a right answer in the column `completion`; a reward does not read it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

Rows = list[dict[str, Any]]

COUNTS = {"train": 200, "dev": 40, "test": 100}
TOPICS = (
    "cows bread music rain winter tea books snow clocks cheese birds bridges paper gold forests salt milk "
    "dreams chess trains gardens coffee bicycles cats rivers horses football islands stars boats maps spoons "
    "windows apples sheep candles doors pencils storms roads lemons drums hats wolves"
).split()
FORMS = (
    *("Tell me about {}.", "What are {} good for?", "Why do people like {}?", "Describe {} to a child."),
    *("How would you explain {}?", "What is odd about {}?", "Where do you find {}?", "Praise {}."),
)
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jill Kai Lena Max Nora Otto Pia".split()
COLORS = "red blue green black white brown yellow grey".split()
ANIMALS = "cow cat dog horse goat duck hen pig".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
).split()


def short_rows() -> Rows:
    """Return questions to be answered in a few words."""
    return [
        _row(f"{form.format(topic)} Answer in at most 15 words.")
        for form, topic in itertools.product(FORMS, TOPICS)
    ]


def json_rows() -> Rows:
    """Return sentences whose facts are to be written as JSON."""
    return [
        _row(
            f"{name} has a {color} {animal}. Write JSON with the keys name, color and animal.",
            json.dumps({"name": name, "color": color, "animal": animal}),
            name=name,
            color=color,
            animal=animal,
        )
        for name, color, animal in itertools.product(NAMES, COLORS, ANIMALS)
    ]


def sum_rows() -> Rows:
    """Return sums and differences in words."""
    cases = [
        (f"{NUMBERS[a]} {word} {NUMBERS[b]}", a + sign * b)
        for word, sign in (("plus", 1), ("minus", -1))
        for a, b in itertools.product(range(len(NUMBERS)), repeat=2)
        if a + sign * b >= 0
    ]
    return [
        _row(f"What is {text}? Answer with the number alone.", str(value), total=value)
        for text, value in cases
    ]


def _row(prompt: str, completion: str = "", **columns: Any) -> dict[str, Any]:
    answer = {"completion": completion} if completion else {}
    return {"prompt": [{"role": "user", "content": prompt}], **answer, **columns}


FIELDS: dict[str, Any] = {name: {"type": "string"} for name in ("name", "color", "animal")}
SCHEMA: dict[str, Any] = {"type": "object", "required": [*FIELDS], "properties": FIELDS}
RULES: Mapping[str, list[dict[str, Any]]] = {
    "short": [
        {"rule": "length", "unit": "words", "at_least": 3, "at_most": 15},
        {"rule": "regex", "pattern": ".*[.!?]"},
    ],
    # Rewards with steps in between: at first, few completions fit the schema, or are numbers.
    "json": [
        {"rule": "regex", "pattern": r"\{.*"},
        {"rule": "regex", "pattern": r".*\}"},
        {"rule": "json"},
        {"rule": "json", "schema": SCHEMA},
        *({"rule": "contains", "column": name} for name in FIELDS),
    ],
    "sum": [
        {"rule": "number", "column": "total", "weight": 2.0},
        {"rule": "number", "column": "total", "tolerance": 3},
        {"rule": "regex", "pattern": r"\d+"},
    ],
}
# Maximum number of tokens of a completion.
LENGTHS: Mapping[str, int] = {"short": 32, "json": 48, "sum": 12}
TASKS: Mapping[str, Callable[[], Rows]] = {"short": short_rows, "json": json_rows, "sum": sum_rows}


def make_splits(task: str) -> dict[str, Rows]:
    """Return the rows of a task by split, always the same; no row is in two splits."""
    rows = TASKS[task]()
    random.Random(0).shuffle(rows)
    splits, start = {}, 0
    for split, count in COUNTS.items():
        splits[split] = rows[start : start + count]
        start += count
    return splits
