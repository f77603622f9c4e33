"""Rows of a parquet file, decoded batch by batch in a child process within bounds that follow from its size.

A few bytes of parquet can stand for gigabytes: a dictionary with one long text, a run of a billion equal
values, a page that was compressed well. What the file says of itself is checked first; since that may be
wrong, the child that decodes has a limit of memory, and every batch is counted before its rows are made.
"""

from __future__ import annotations

import json
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prge.errors import DataError, first_line
from prge.host.children import BoundedChild, LimitError
from prge.host.packages import install_extra
from prge.host.regular_files import open_regular

# Bytes of rows, as Python has them, that are read of any file; and for each byte of the file. Ordinary rows
# take less than a tenth of that.
LEAST_BYTES = 128 << 20
BYTES_PER_BYTE = 128
# What Python takes for a row and for each of its values, beside the bytes of texts and numbers.
ROW_BYTES, VALUE_BYTES = 400, 100
# Of the child that decodes: CPU time of a batch; memory, and as much more for each byte of the file.
SECONDS = 20.0
CHILD_BYTES = 128 << 20
CHILD_BYTES_PER_BYTE = 16
# Of a batch: rows, and bytes as far as the file says how many they are.
_MOST_ROWS, _BATCH_BYTES = 256, 4 << 20
# Allocators of pyarrow's own reserve addresses at once, which are not taken then but count for the limit. It
# chooses one when it is imported, which another package may have done before.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
_RESERVED_BYTES = 1 << 30
_ERROR, _BATCH = b"e", b"b"
_REMEDY = "write the file again, or as jsonl"


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a parquet file, in order, with values as pyarrow makes them.

    Raises:
        DataError: pyarrow isn't installed, the file is not parquet, or its rows take far more memory than
            its size explains.
    """
    what = f"{path} can't be read as data"
    try:
        import pyarrow.compute
        import pyarrow.parquet  # both now, the child can't read their files
    except ImportError:
        raise DataError(
            what,
            ["parquet needs the package pyarrow, which is not installed"],
            remedy=f"{install_extra('data')}, or write the rows as jsonl",
            code="package-missing",
        ) from None
    try:
        with open_regular(path, "rb", follow=True) as stream:
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is empty"
        raise DataError(what, [f"not parquet: {reason}"], remedy=_REMEDY, code="parquet-damaged") from None
    memory = CHILD_BYTES + CHILD_BYTES_PER_BYTE * len(content)
    memory += _RESERVED_BYTES * (pyarrow.default_memory_pool().backend_name != "system")
    child = BoundedChild(_Decoder(content), SECONDS, memory)

    def asked(request: bytes) -> bytes:
        try:
            answer = child.ask(request)
        except LimitError as error:
            raise DataError(what, [f"decoding it {error}"], remedy=_REMEDY, code="parquet-damaged") from None
        if answer[:1] == _ERROR:
            raise DataError(
                what, [f"not parquet: {answer[1:].decode()}"], remedy=_REMEDY, code="parquet-damaged"
            )
        return answer[1:]

    facts = json.loads(asked(b"open"))
    twice = sorted(name for name, count in Counter(facts["names"]).items() if count > 1)
    if twice:
        raise DataError(what, [f"it has columns twice: {', '.join(map(repr, twice))}"], code="columns-twice")
    claimed = facts["rows"] * (ROW_BYTES + VALUE_BYTES * len(facts["names"])) + facts["bytes"]
    check_expansion(path, len(content), claimed)
    size = 0
    while answer := asked(b"next"):
        with pyarrow.ipc.open_stream(answer) as reader:
            batch = reader.read_next_batch()
        size += ROW_BYTES * len(batch) + batch.nbytes
        size += VALUE_BYTES * sum(map(_count_values, batch.columns))
        check_expansion(path, len(content), size)
        yield from batch.to_pylist()


def check_expansion(path: Path, file_bytes: int, row_bytes: int) -> None:
    """Raise DataError where rows take far more memory than the size of their file explains.

    Args:
        path: of the file.
        file_bytes: its size.
        row_bytes: what its rows take in memory, or those that were read so far.
    """
    most = LEAST_BYTES + BYTES_PER_BYTE * file_bytes
    if row_bytes > most:
        raise DataError(
            f"{path} can't be read as data",
            [
                f"its {file_bytes:,} bytes stand for rows of more than {row_bytes >> 20:,} MiB, at most "
                f"{most >> 20:,} MiB are read of a file of this size"
            ],
            remedy="write the rows as jsonl, or several files, if they are meant to be so many",
            code="file-expands",
        )


def _count_values(array: Any) -> int:
    """Values of an Arrow array, those within lists, structs and maps included."""
    from pyarrow import types

    if hasattr(array, "storage"):  # of an extension type
        return _count_values(array.storage)
    if types.is_map(array.type):
        return len(array) + 2 * _count_values(array.keys) + _count_values(array.items)
    if types.is_struct(array.type):
        return len(array) + sum(map(_count_values, array.flatten()))
    if types.is_nested(array.type):
        return len(array) + _count_values(array.flatten())
    return len(array)


def _dense(type_: Any) -> Any:
    """The Arrow type that has every value by itself: without dictionaries, which count a value once."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(type_) or types.is_run_end_encoded(type_):
        return _dense(type_.value_type)
    if types.is_map(type_):
        return pyarrow.map_(_dense(type_.key_type), _dense(type_.item_type))
    if types.is_struct(type_):
        return pyarrow.struct([field.with_type(_dense(field.type)) for field in type_])
    if types.is_fixed_size_list(type_):
        return pyarrow.list_(_dense(type_.value_type), type_.list_size)
    if types.is_large_list(type_):
        return pyarrow.large_list(_dense(type_.value_type))
    return pyarrow.list_(_dense(type_.value_type)) if types.is_list(type_) else type_


class _Decoder:
    """The child's side: answers `open` with what the file says of itself, and `next` with a batch of rows."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._batches: Iterator[Any] = iter(())

    def __call__(self, request: bytes) -> bytes:
        """The answer: JSON, or a batch in Arrow's stream format, empty after the last one."""
        try:
            return _BATCH + (self._open() if request == b"open" else self._next())
        except MemoryError:
            raise
        except Exception as error:  # pyarrow's own, and Python's for names that are no UTF-8
            return _ERROR + first_line(error).encode(errors="replace")

    def _open(self) -> bytes:
        import pyarrow
        from pyarrow import parquet

        file = parquet.ParquetFile(pyarrow.py_buffer(self._content))
        facts = file.metadata
        size = sum(facts.row_group(index).total_byte_size for index in range(facts.num_row_groups))
        rows = min(max(_BATCH_BYTES * facts.num_rows // max(size, 1), 1), _MOST_ROWS)
        self._batches = file.iter_batches(rows, use_threads=False)
        return json.dumps({"rows": facts.num_rows, "bytes": size, "names": file.schema_arrow.names}).encode()

    def _next(self) -> bytes:
        import pyarrow

        batch = next(self._batches, None)
        if batch is None:
            return b""
        columns = [
            column if (dense := _dense(column.type)) == column.type else column.cast(dense)
            for column in batch.columns
        ]
        batch = pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)
        batch.validate(full=True)  # texts may be no UTF-8
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue())
