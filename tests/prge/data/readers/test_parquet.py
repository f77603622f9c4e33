"""Parquet: small files that expand to gigabytes, wrong metadata, and files that crash the decoder."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from prge.data.readers.files import read_rows
from prge.errors import DataError
from tests.refusals import raises

REPOSITORY = Path(__file__).resolve().parents[4]
MAX_MEGABYTES = 300
# Prints the error, and the peak memory in megabytes of this process and its children.
READ = """
import resource, sys
import pyarrow.compute, pyarrow.parquet
from prge.errors import DataError
from prge.data.readers.files import read_rows
peak = lambda who: resource.getrusage(who).ru_maxrss >> 10
start = peak(resource.RUSAGE_SELF)
try:
    print(len(read_rows(sys.argv[1])), "rows")
except DataError as error:
    print(error)
print(peak(resource.RUSAGE_SELF) - start + max(peak(resource.RUSAGE_CHILDREN) - start, 0))
"""


def one_long_text() -> pyarrow.Table:
    indices = pyarrow.array([0] * 5000, pyarrow.int32())
    return pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(indices, ["x" * 1_000_000])})


def many_equal_numbers() -> pyarrow.Table:
    return pyarrow.table({"label": pyarrow.array([1] * 20_000_000, pyarrow.int8())})


def one_row_of_many_nulls() -> pyarrow.Table:
    offsets, nulls = pyarrow.array([0, 30_000_000], pyarrow.int32()), pyarrow.nulls(30_000_000)
    return pyarrow.table({"a": pyarrow.ListArray.from_arrays(offsets, nulls)})


def one_text_of_zeros() -> pyarrow.Table:
    return pyarrow.table({"text": ["0" * 200_000_000]})


def medium_texts() -> pyarrow.Table:
    """Return a table whose batches fit the child's memory, so that the parent counts them."""
    indices = pyarrow.array([0] * 100_000, pyarrow.int32())
    return pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(indices, ["x" * 20_000])})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (one_long_text, "takes more than"),
        (many_equal_numbers, "expand to rows of more than 9,536 MiB"),
        (one_row_of_many_nulls, "takes more than"),
        (one_text_of_zeros, "expand to rows of more than 190 MiB"),
        (medium_texts, "expand to rows of more than"),
    ],
)
def test_files_that_expand_too_much_are_refused(
    tmp_path: Path, make: Callable[[], Any], message: str
) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(make(), path, compression="zstd")
    assert path.stat().st_size < 400_000
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "ARROW_DEFAULT_MEMORY_POOL": "system"}
    command = [sys.executable, "-c", READ, str(path)]
    output = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    *lines, megabytes = output.splitlines()
    assert f"{path} can't be read as data" in lines[0] and message in lines[1], output
    assert int(megabytes) < MAX_MEGABYTES


def test_ordinary_files_are_read_whatever_they_repeat(tmp_path: Path) -> None:
    """Values equal pyarrow's for the same table, with dictionaries, batches and row groups."""
    texts = [f"{index} words of this row" for index in range(5000)]
    table = pyarrow.table(
        {
            "text": texts,
            "label": pyarrow.array(["good"] * 5000).dictionary_encode(),
            "messages": [[{"role": "user", "content": text}] for text in texts],
            "names": pyarrow.array([[("a", 1)]] * 5000, pyarrow.map_(pyarrow.string(), pyarrow.int8())),
        }
    )
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, row_group_size=1700)
    rows = read_rows(path)
    assert [row.number for row in rows] == list(range(1, 5001))
    assert [row.fields for row in rows] == table.to_pylist()


def test_texts_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    content = pyarrow.array([b"fine", b"\xff\xfe"])
    text = pyarrow.StringArray.from_buffers(2, *content.buffers()[1:])
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": text}), path)
    with raises(DataError, "parquet-damaged", containing=str(path)):
        read_rows(path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1\xff\xff\xff\x7fPAR1", b"PAR1" * 1000])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with raises(DataError, "parquet-damaged", containing=str(path)):
        read_rows(path)


def test_files_with_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    turns = [[{"role": "user", "content": f"{index}"}] for index in range(50)]
    parquet.write_table(pyarrow.table({"text": list(map(str, range(50))), "messages": turns}), source)
    content, chosen = source.read_bytes(), random.Random(0)
    path = tmp_path / "b.parquet"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(chosen.randint(1, 8)):
            changed[chosen.randrange(len(changed))] = chosen.randrange(256)
        path.write_bytes(changed)
        with contextlib.suppress(DataError):
            read_rows(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_MEGABYTES << 10
