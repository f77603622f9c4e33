"""Rows into parts for training and development, by what they say and not by where they stand.

Rows of equal content are one group, and a group is in one part. Groups are taken in the order of their
hashes: which part a row is in depends on the rows' contents alone, and more rows move few of the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from prge.data.readers.files import Row

_SHARE = 0.1
# Of the part that is split off: with fewer rows a figure says little, with more it takes time alone.
MIN_DEV_ROWS, MAX_DEV_ROWS = 16, 500
# It takes this share of the rows where it would have fewer than MIN_DEV_ROWS.
MOST_OF_FEW = 0.2


@dataclass(frozen=True)
class Splits:
    """Rows of each part, in the order that they had; `notes` say what a person should know of them."""

    train: list[Row]
    dev: list[Row]
    notes: list[str] = field(default_factory=list)


def split_rows(rows: Sequence[Row], columns: Collection[str] | None = None) -> Splits:
    """Split a tenth of the rows off for development; the parts share no content.

    These are at least `MIN_DEV_ROWS` as long as that is no more than a fifth of the rows, and at most `MAX_DEV_ROWS`. A
    group that is larger than what there is room for stays in training, unless every group is. At least one
    group stays in training.

    Args:
        rows: of one file.
        columns: those that are read: rows that differ in others are equal. Default: all.
    """
    groups: dict[bytes, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(content_hash(row, columns), []).append(index)
    in_order = [groups[key] for key in sorted(groups)]
    chosen = {index for group in _chosen(in_order, dev_row_count(len(rows))) for index in group}
    train = [row for index, row in enumerate(rows) if index not in chosen]
    dev = [row for index, row in enumerate(rows) if index in chosen]
    few = "; figures of so few say little" if len(dev) < MIN_DEV_ROWS else ""
    notes = [f"dev: {len(dev)} of {len(rows)} rows, by a hash of their content{few}"]
    if not dev:
        notes = ["no dev rows can be split off: all rows are equal"]
    if repeated := len(rows) - len(groups):
        notes.append(f"{repeated} rows repeat others: equal rows are in one part")
    return Splits(train, dev, notes)


def dev_row_count(rows: int) -> int:
    """Development rows of a file of so many, at least one."""
    return max(1, min(max(round(_SHARE * rows), min(MIN_DEV_ROWS, int(MOST_OF_FEW * rows))), MAX_DEV_ROWS))


def content_hash(row: Row, columns: Collection[str] | None = None) -> bytes:
    """A hash of what a row says in some columns (default: all), whatever their order."""
    fields = {name: value for name, value in row.fields.items() if columns is None or name in columns}
    # The 0 keeps the parts of files that were split before.
    text = json.dumps([0, fields], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).digest()


def _chosen(groups: Sequence[list[int]], room: int) -> list[list[int]]:
    """The first groups that fit into so much room, else the smallest; one group at least is left."""
    chosen: list[list[int]] = []
    for group in groups:
        if len(group) <= room and len(chosen) + 1 < len(groups):
            chosen.append(group)
            room -= len(group)
    if not chosen and len(groups) > 1:
        chosen = [min(groups, key=len)]
    return chosen
