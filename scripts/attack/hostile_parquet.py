"""Small parquet files with far more content than their size, and damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import damage
import pyarrow
from pyarrow import parquet

_LABELS = pyarrow.array([0])


def _write(path: Path, count: int, groups: int, **columns: pyarrow.Array) -> None:
    """Write equal rows in groups."""
    nothing = pyarrow.array([0] * count, pyarrow.int32())
    taken = {name: pyarrow.DictionaryArray.from_arrays(nothing, value) for name, value in columns.items()}
    table = pyarrow.table(taken)
    with parquet.ParquetWriter(path, table.schema, compression="zstd", use_dictionary=True) as writer:
        for _ in range(groups):
            writer.write_table(table)


def _one_long_text(path: Path, random: Random) -> None:
    text = pyarrow.array(["a" * random.choice([100_000, 1_000_000])])
    _write(path, 20_000, random.choice([1, 4]), text=text, label=_LABELS)


def _many_rows(path: Path, random: Random) -> None:
    _write(path, 1_000_000, random.choice([20, 60]), text=pyarrow.array(["aa"]), label=_LABELS)


def _many_columns(path: Path, random: Random) -> None:
    text = pyarrow.array(["aa"])
    _write(path, 1000, 1, **{f"c{number}": text for number in range(2000)})


def _nested(path: Path, random: Random) -> None:
    element_type: pyarrow.DataType = pyarrow.string()
    value: object = "aa"
    for _ in range(random.choice([10, 60])):
        element_type, value = pyarrow.list_(element_type), [value] * 1
    many = pyarrow.array([[value] * 10_000] * 100, pyarrow.list_(element_type))
    parquet.write_table(pyarrow.table({"text": many}), path, compression="zstd")


def _compressed(path: Path, random: Random) -> None:
    text = pyarrow.array(["a" * 20_000_000] * 20)
    parquet.write_table(pyarrow.table({"text": text}), path, compression="zstd", use_dictionary=False)


def _damaged(path: Path, random: Random) -> None:
    texts = pyarrow.array([f"aa {number % 7}" for number in range(200)])
    parquet.write_table(pyarrow.table({"text": texts, "label": [0, 1] * 100}), path)
    damage.MUTATIONS[random.choice(["one bit", "eight bits", "noise", "zeros", "cut", "cut out", "grown"])](
        path, random
    )


# Writers of files, and whether their rows must be refused.
MUTATIONS: dict[str, tuple[Callable[[Path, Random], None], bool]] = {
    "one long text many times": (_one_long_text, True),
    "many rows": (_many_rows, False),
    "many columns": (_many_columns, False),
    "nested lists": (_nested, True),
    "long texts": (_compressed, False),
    "damaged": (_damaged, False),
    "damaged again": (_damaged, False),
}
