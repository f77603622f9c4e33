"""Rows into parts for training, development and test, by what they say and not by where they stand.

Rows of equal content are one group, and a group is in one part. Groups are taken in the order of their
hashes: which part a row is in depends on the rows' contents alone, and more rows move few of the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from prge.rows.readers import Row

SHARE = 0.1
# Of a part that is split off: with fewer rows a figure says little, with more it takes time and says no more.
FEWEST, MOST = 16, 500
# A part that would have fewer rows than FEWEST takes this share of the rows instead.
MOST_OF_FEW = 0.2


@dataclass(frozen=True)
class Parts:
    """Rows of each part, in the order that they had; `notes` say what a person should know of them."""

    train: list[Row]
    dev: list[Row]
    test: list[Row]
    notes: list[str] = field(default_factory=list)


def split_rows(
    rows: Sequence[Row],
    dev: float = SHARE,
    test: float = 0.0,
    columns: Collection[str] | None = None,
    seed: int = 0,
) -> Parts:
    """Split rows into parts that share no content.

    A part has its share of the rows, but at least `FEWEST` as long as that is no more than a fifth of them,
    and at most `MOST`. A group that is larger than what a part has room for stays in training, unless every
    group is. At least one group stays in training; of one group alone there is no development part, of two no
    test part beside it.

    Args:
        rows: of one file.
        dev: share of the rows for development; 0: none.
        test: share of the rows for test; 0: none.
        columns: those that are read: rows that differ in others are equal. Default: all.
        seed: other parts of the same rows.
    """
    groups: dict[bytes, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(content_hash(row, columns, seed), []).append(index)
    waiting = [groups[key] for key in sorted(groups)]
    taken: dict[str, set[int]] = {"dev": set(), "test": set()}
    # Development first: where rows are few, a run needs it more than a test.
    for name, share, left in (("dev", dev, 1 + (test > 0)), ("test", test, 1)):
        if share > 0:
            chosen = _chosen(waiting, wanted(len(rows), share), max(1, min(left, len(waiting) - 1)))
            waiting = [group for number, group in enumerate(waiting) if number not in chosen]
            taken[name] = {index for group in chosen.values() for index in group}
    parts = {name: [rows[index] for index in sorted(indices)] for name, indices in taken.items()}
    train = [rows[index] for index in sorted(index for group in waiting for index in group)]
    asked = [name for name, share in (("dev", dev), ("test", test)) if share > 0]
    notes = [_part_note(name, len(parts[name]), len(rows), len(groups)) for name in asked]
    if (repeated := len(rows) - len(groups)) and asked:
        notes.append(f"{repeated} rows repeat others: equal rows are in one part")
    return Parts(train, parts["dev"], parts["test"], notes)


def wanted(rows: int, share: float) -> int:
    """Rows of a part of a file of so many, at least one."""
    return max(1, min(max(round(share * rows), min(FEWEST, int(MOST_OF_FEW * rows))), MOST))


def content_hash(row: Row, columns: Collection[str] | None = None, seed: int = 0) -> bytes:
    """A hash of what a row says in some columns (default: all), whatever their order."""
    fields = {name: value for name, value in row.fields.items() if columns is None or name in columns}
    text = json.dumps([seed, fields], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).digest()


def _chosen(groups: Sequence[list[int]], most: int, left: int) -> dict[int, list[int]]:
    """Groups by their numbers, the first ones that fit into `most` rows; so many at least are left."""
    chosen: dict[int, list[int]] = {}
    room = most
    for number, group in enumerate(groups):
        if len(group) <= room and len(chosen) + left < len(groups):
            chosen[number] = group
            room -= len(group)
    if not chosen and len(groups) > 1:
        smallest = min(range(len(groups)), key=lambda number: len(groups[number]))
        chosen[smallest] = groups[smallest]
    return chosen


def _part_note(name: str, count: int, rows: int, groups: int) -> str:
    if not count:
        reason = "all rows are equal" if groups == 1 else "there are too few different rows"
        return f"no {name} rows can be split off: {reason}"
    few = "; figures of so few say little" if count < FEWEST else ""
    return f"{name}: {count} of {rows} rows, by a hash of their content{few}"
