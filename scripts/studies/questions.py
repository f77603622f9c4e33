"""Generate rows of six classes in the style of TREC: the type of answer that a question asks for.

Questions are made of patterns and words. No two splits share a word for a pattern's gaps; an eighth of the
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
# Patterns of a class in a split: all splits share those below the first number; some have one more.
_COMMON, _OWN = 6, {"dev": (6,), "test": (7,), "train": ()}


def make_questions(counts: Mapping[str, int] = ROWS) -> dict[str, list[dict[str, str | int]]]:
    """Return rows by split, always the same.

    Args:
        counts: rows of `dev`, `test` and `train`, in this order.
    """
    rng = random.Random(0)
    patterns = list(_TABLE["patterns"].values())
    words = {name: text.split() for name, text in _TABLE["words"].items()}
    for each in words.values():
        rng.shuffle(each)
    splits = {}
    for index, (split, count) in enumerate(counts.items()):
        words_of_split = {name: each[index :: len(counts)] for name, each in words.items()}
        rows: list[dict[str, str | int]] = []
        for number in range(count):
            label = number % len(patterns)
            patterns_of_label = [patterns[label][at] for at in (*range(_COMMON), *_OWN[split])]
            gaps = {name: rng.choice(each) for name, each in words_of_split.items()}
            rows.append({"text": rng.choice(patterns_of_label).format(**gaps), "coarse_label": label})
        rng.shuffle(rows)
        splits[split] = rows
    return splits
