"""Rows that teach a style of answers, which a rule recognizes.

A prompt has a name, an animal and a thing, and the answer names two of its words:

    One day, Lily and a fox found a red hat. "Oh my, a hat!" said the fox. And that was that.

A pair of animal and thing is in training, development or test rows alone, so memorized answers are wrong.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

NAMES = "Lily Tim Tom Ben Sam Max Sue Amy Jack Anna Lucy Jane".split()
ANIMALS = "cat dog fox bird bear frog duck mouse rabbit lion fish pig cow horse bee owl".split()
LOOKS = "red big little blue green shiny pretty old".split()
THINGS = "ball hat box car book boat bell cup doll drum kite leaf rock shoe stick toy".split()
PROMPT = "One day, {name} and a {animal} found a {look} {thing}."
COMPLETION = ' "Oh my, a {thing}!" said the {animal}. And that was that.'
STYLE_PATTERN = re.compile(r' "Oh my, a \w+!" said the \w+\. And that was that\.')
BEFORE = "base"  # the name of the model without an adapter
ROWS = {"dev": 60, "test": 100, "train": 300}


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


def shares(texts: Sequence[str], rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return the share of answers in the style (`style`) and of exactly right answers (`right`)."""
    return {
        "style": sum(STYLE_PATTERN.fullmatch(text) is not None for text in texts) / len(rows),
        "right": sum(text == row["completion"] for text, row in zip(texts, rows, strict=True)) / len(rows),
    }
