"""Splits rows into parts for training and development, by their content rather than their position.

Rows with equal content form a group, and a group is in one part. Groups are taken in the order of their
hashes, so the split depends only on the rows' contents, and adding rows moves few others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from prge.data.readers.files import Row

_SHARE = 0.1
# Size of the development part: fewer rows give noisy figures, more rows only take time.
MIN_DEV_ROWS, MAX_DEV_ROWS = 16, 500
# Largest share of the rows that is split off to reach MIN_DEV_ROWS.
MAX_DEV_SHARE = 0.2


@dataclass(frozen=True)
class Splits:
    """The rows of each part in their original order, and notes for the user."""

    train: list[Row]
    dev: list[Row]
    notes: list[str] = field(default_factory=list)


def split_rows(rows: Sequence[Row], columns: Collection[str] | None = None) -> Splits:
    """Split a tenth of the rows off for development; the parts share no content.

    The development part has at least `MIN_DEV_ROWS` rows if this is at most a fifth of the rows, and at most
    `MAX_DEV_ROWS`. A group that doesn't fit in stays in training, unless no group fits. At least one group
    stays in training.

    Args:
        rows: rows of one file.
        columns: columns that are read; rows that differ only in others count as equal. Default: all.
    """
    groups: dict[bytes, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(content_hash(row, columns), []).append(index)
    in_order = [groups[key] for key in sorted(groups)]
    chosen = {index for group in _chosen(in_order, dev_row_count(len(rows))) for index in group}
    train = [row for index, row in enumerate(rows) if index not in chosen]
    dev = [row for index, row in enumerate(rows) if index in chosen]
    few = "; figures of so few rows are noisy" if len(dev) < MIN_DEV_ROWS else ""
    notes = [f"dev: {len(dev)} of {len(rows)} rows, by a hash of their content{few}"]
    if not dev:
        notes = ["no dev rows can be split off: all rows are equal"]
    if repeated := len(rows) - len(groups):
        notes.append(f"{repeated} rows repeat others: equal rows are in one part")
    return Splits(train, dev, notes)


def dev_row_count(rows: int) -> int:
    """Return the number of development rows to split off, at least one."""
    return max(1, min(max(round(_SHARE * rows), min(MIN_DEV_ROWS, int(MAX_DEV_SHARE * rows))), MAX_DEV_ROWS))


def content_hash(row: Row, columns: Collection[str] | None = None) -> bytes:
    """Return a hash of a row's values in some columns (default: all), independent of their order."""
    fields = {name: value for name, value in row.fields.items() if columns is None or name in columns}
    # The 0 keeps the splits of earlier versions.
    text = json.dumps([0, fields], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).digest()


def _chosen(groups: Sequence[list[int]], room: int) -> list[list[int]]:
    """Return the first groups that fit into `room` rows, else the smallest; one group at least is left."""
    chosen: list[list[int]] = []
    for group in groups:
        if len(group) <= room and len(chosen) + 1 < len(groups):
            chosen.append(group)
            room -= len(group)
    if not chosen and len(groups) > 1:
        chosen = [min(groups, key=len)]
    return chosen
