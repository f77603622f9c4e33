"""Reads rows of a parquet file in a child process, with limits that follow from the size of the file.

A few bytes of parquet can expand to gigabytes: a dictionary with one long text, a run of a billion equal
values, a well-compressed page. The file's own metadata is checked first. Since it may be wrong, the decoding
child has a memory limit, and every batch is measured before its rows are created.
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
from prge.system.packages import install_extra_command
from prge.system.regular_files import open_regular
from prge.system.sandbox import BoundedChild, LimitError

# Limit of the rows' size in Python's memory: a constant, and bytes for each byte of the file. Ordinary rows
# take less than a tenth of it.
MIN_BYTES = 128 << 20
BYTES_PER_BYTE = 128
# Memory that Python takes for a row and for each value, besides the bytes of texts and numbers.
ROW_BYTES, VALUE_BYTES = 400, 100
# Limits of the decoding child: CPU seconds of a batch; memory, as a constant and for each byte of the file.
SECONDS = 20.0
CHILD_BYTES = 128 << 20
CHILD_BYTES_PER_BYTE = 16
# Size of a batch: the maximum of rows, and bytes according to the file's metadata.
_MAX_ROWS, _BATCH_BYTES = 256, 4 << 20
# pyarrow's own allocators reserve address space at once, which counts for the limit. pyarrow chooses an
# allocator when it is imported, which another package may have done before.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
_RESERVED_BYTES = 1 << 30
_ERROR, _BATCH = b"e", b"b"
_REMEDY = "Write the file again, or as jsonl."


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file in order, with pyarrow's Python values.

    Raises:
        DataError: pyarrow isn't installed, the file is not parquet, or its rows take far more memory than
            its size explains.
    """
    what = f"{path} can't be read as data:"
    try:
        import pyarrow.compute
        import pyarrow.parquet  # imported before the child, which can't open files
    except ImportError:
        raise DataError(
            what,
            ["parquet needs the package pyarrow, which is not installed"],
            remedy=f"{install_extra_command('data')}, or write the rows as jsonl.",
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

    def request_child(request: bytes) -> bytes:
        try:
            response = child.call(request)
        except LimitError as error:
            raise DataError(what, [f"decoding it {error}"], remedy=_REMEDY, code="parquet-damaged") from None
        if response[:1] == _ERROR:
            raise DataError(
                what, [f"not parquet: {response[1:].decode()}"], remedy=_REMEDY, code="parquet-damaged"
            )
        return response[1:]

    metadata = json.loads(request_child(b"open"))
    duplicates = sorted(name for name, count in Counter(metadata["names"]).items() if count > 1)
    if duplicates:
        raise DataError(
            what, [f"it has columns twice: {', '.join(map(repr, duplicates))}"], code="columns-twice"
        )
    claimed = metadata["rows"] * (ROW_BYTES + VALUE_BYTES * len(metadata["names"])) + metadata["bytes"]
    check_expansion(path, len(content), claimed)
    size = 0
    while answer := request_child(b"next"):
        with pyarrow.ipc.open_stream(answer) as reader:
            batch = reader.read_next_batch()
        size += ROW_BYTES * len(batch) + batch.nbytes
        size += VALUE_BYTES * sum(map(_count_values, batch.columns))
        check_expansion(path, len(content), size)
        yield from batch.to_pylist()


def check_expansion(path: Path, file_bytes: int, row_bytes: int) -> None:
    """Raise DataError if rows take far more memory than the size of their file explains.

    Args:
        path: the file.
        file_bytes: size of the file.
        row_bytes: memory of its rows, or of those read so far.
    """
    limit = MIN_BYTES + BYTES_PER_BYTE * file_bytes
    if row_bytes > limit:
        raise DataError(
            f"{path} can't be read as data:",
            [
                f"its {file_bytes:,} bytes expand to rows of more than {row_bytes >> 20:,} MiB; the limit "
                f"for a file of this size is {limit >> 20:,} MiB"
            ],
            remedy="If this is intended, write the rows as jsonl or as several files.",
            code="file-expands",
        )


def _count_values(array: Any) -> int:
    """Count the values of an Arrow array, including those within lists, structs and maps."""
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
    """Return the Arrow type without dictionary and run-end encoding, which store repeated values once."""
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
    """The child's side: answers `open` with the file's metadata, and `next` with a batch of rows."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._batches: Iterator[Any] = iter(())

    def __call__(self, request: bytes) -> bytes:
        """Return the response: JSON, or a batch in Arrow's stream format, empty after the last batch."""
        try:
            return _BATCH + (self._open() if request == b"open" else self._next())
        except MemoryError:
            raise
        except Exception as error:  # pyarrow's exceptions, and Python's for names that are not UTF-8
            return _ERROR + first_line(error).encode(errors="replace")

    def _open(self) -> bytes:
        import pyarrow
        from pyarrow import parquet

        file = parquet.ParquetFile(pyarrow.py_buffer(self._content))
        metadata = file.metadata
        size = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
        rows = min(max(_BATCH_BYTES * metadata.num_rows // max(size, 1), 1), _MAX_ROWS)
        self._batches = file.iter_batches(rows, use_threads=False)
        return json.dumps(
            {"rows": metadata.num_rows, "bytes": size, "names": file.schema_arrow.names}
        ).encode()

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
        batch.validate(full=True)  # texts may not be UTF-8
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue())
