"""Rows of six classes, in the manner of TREC: what kind of thing does a question ask for?

Questions are made of patterns and words. No two splits share a word of a pattern's gaps; an eighth of the
patterns is new in development rows, and another eighth in test rows. Columns and labels are those of the
task `trec`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ROWS = {"dev": 100, "test": 300, "train": 300}
# Patterns of a class that a split has: all have those below the first number, and one more of their own.
_COMMON, _OWN = 6, {"dev": (6,), "test": (7,), "train": ()}


def make_questions(counts: Mapping[str, int] = ROWS) -> dict[str, list[dict[str, str | int]]]:
    """Rows by split, the same every time.

    Args:
        counts: rows of `dev`, `test` and `train`, in this order.
    """
    chance = random.Random(0)
    patterns = list(_TABLE["patterns"].values())
    words = {name: text.split() for name, text in _TABLE["words"].items()}
    for each in words.values():
        chance.shuffle(each)
    found = {}
    for place, (split, count) in enumerate(counts.items()):
        own = {name: each[place :: len(counts)] for name, each in words.items()}
        rows: list[dict[str, str | int]] = []
        for number in range(count):
            label = number % len(patterns)
            chosen = [patterns[label][at] for at in (*range(_COMMON), *_OWN[split])]
            gaps = {name: chance.choice(each) for name, each in own.items()}
            rows.append({"text": chance.choice(chosen).format(**gaps), "coarse_label": label})
        chance.shuffle(rows)
        found[split] = rows
    return found
