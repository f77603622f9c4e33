"""The journal of a run: an append-only log from which the trained adapter can be computed again.

Every line is a JSON object with the CRC-32 of its content. An incomplete last line, left by a kill or a full
disk, is dropped; a damaged line before it is an error.

    {"type": "start", ...}       identity of the run: settings, bundle, seed
    {"type": "head", ...}        an encoder's fitted head
    {"type": "step", ...}        rows, projected gradients or gradient, learning rate, loss
    {"type": "evaluation", ...}  loss and metrics on development rows before a step
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from prge.engine import FloatArray
from prge.errors import RunError
from prge.formats.documents import parse_json
from prge.system.atomic import storage_error, write_file
from prge.system.regular_files import open_regular, read_regular

Record = dict[str, Any]
# Key of an exact gradient in a step's record: megabytes for a large adapter.
GRADIENT = "gradient"
# Key of a record's type in version 0.2, whose ledgers of devices and histories of servers are still read.
_OLD_TYPE = "kind"


class Journal:
    """The journal of a run, opened for appending, or only for reading while another process may write to it.

    Args:
        path: path of the file.
        writable: whether to open it for appending; creates the file.

    Attributes:
        records: the records, in order.

    Raises:
        RunError: a line other than the last is damaged, or the file can't be written.
    """

    def __init__(self, path: Path, writable: bool = True) -> None:
        self.path = path
        self._stream: BinaryIO | None = None
        # Whether the file ends with an incomplete line that couldn't be removed.
        self._is_torn = False
        # Names of the other files in the folder of a new journal.
        self._initial_names = None if not writable or os.path.lexists(path) else _names(path)
        try:
            self.records, self._length = _read(path)
            if writable:
                self._stream = open_regular(path, "ab", buffering=0)
                self._stream.truncate(self._length)
        except OSError as error:
            raise storage_error(path, error) from None
        self._by_step = {(record["type"], record.get("step")): record for record in self.records}

    def first(self, record_type: str) -> Record | None:
        """Return the first record of a type; None if there is none."""
        return next((record for record in self.records if record["type"] == record_type), None)

    def step(self, step: int) -> Record | None:
        """Return the record of a step, counted from 0; None if the journal doesn't have it."""
        return self._by_step.get(("step", step))

    def evaluation(self, step: int) -> Record | None:
        """Return the evaluation before a step; None if the journal doesn't have it."""
        return self._by_step.get(("evaluation", step))

    @property
    def steps(self) -> int:
        """Number of steps."""
        return sum(record_type == "step" for record_type, _ in self._by_step)

    def append(self, record: Record) -> Record:
        """Append a record, which survives a kill of the process from then on; return the record.

        Raises:
            RunError: the record can't be written; the journal stays intact.
        """
        if self._stream is None:
            raise ValueError(f"{self.path} is open for reading")
        line = _line(record)
        rest = memoryview(line)
        try:
            if self._is_torn:
                self._stream.truncate(self._length)
            self._is_torn = True
            while rest:
                rest = rest[self._stream.write(rest) :]
            self._is_torn = False
        except OSError as error:
            with contextlib.suppress(OSError):
                self._stream.truncate(self._length)
                self._is_torn = False
            raise storage_error(self.path, error) from None
        self._length += len(line)
        self.records.append(record)
        self._by_step[record["type"], record.get("step")] = record
        return record

    def forget_gradients(self, before: int) -> None:
        """Remove the gradients of the steps before `before`, whose result is in a checkpoint. Atomic.

        Raises:
            RunError: the file can't be written.
        """
        large = [record for record in self.records if GRADIENT in record and record["step"] < before]
        if not large or self._stream is None:
            return
        for record in large:
            del record[GRADIENT]
        content = b"".join(map(_line, self.records))
        write_file(self.path, content)
        self._stream.close()
        self._stream = open_regular(self.path, "ab", buffering=0)
        self._length = len(content)

    def truncate(self, kept: int) -> None:
        """Remove all but the first `kept` records, to undo an operation that wasn't finished."""
        if kept == len(self.records) or self._stream is None:
            return
        del self.records[kept:]
        self._length = sum(len(_line(record)) for record in self.records)
        self._stream.truncate(self._length)
        self._by_step = {(record["type"], record.get("step")): record for record in self.records}

    @contextlib.contextmanager
    def reading(self, record: Record) -> Iterator[None]:
        """Convert exceptions of a block that uses an invalid record of the journal into a RunError."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            where = " ".join(str(record[name]) for name in ("type", "step") if name in record)
            raise RunError(
                f"{self.path}: the record {where!r} can't be used: {type(error).__name__}: {error}",
                remedy="Restore the run folder from a copy, or start the run again in a new folder.",
                code="journal-damaged",
            ) from error

    def sync(self) -> None:
        """Flush the file to the disk, so that its records survive a power failure."""
        if self._stream is not None:
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file; the records stay available.

        A new journal without records is removed, if the folder has no other new files.
        """
        if self._stream is None:
            return
        self._stream.close()
        is_empty = self._initial_names is not None and not self._length and not self._is_torn
        if is_empty and _names(self.path) == self._initial_names:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode_array(values: FloatArray) -> str:
    """Encode f32 values exactly as text: base64 of their little-endian bytes."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def decode_array(text: str) -> FloatArray:
    """Decode a text of `encode_array`, f32 [n]."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)


def _line(record: Record) -> bytes:
    # Numbers are stored exactly: Python prints the shortest decimal that reads back as the same double.
    content = json.dumps(record, separators=(",", ":"), allow_nan=False)
    return f'{{"crc32":"{zlib.crc32(content.encode()):08x}","record":{content}}}\n'.encode()


def _names(path: Path) -> set[str]:
    """Return the names of the other files in a file's folder; empty if the folder can't be read."""
    try:
        return {*os.listdir(path.parent)} - {path.name}
    except OSError:
        return set()


def _read(path: Path) -> tuple[list[Record], int]:
    """Return the intact records of a journal file, and the length of the lines that hold them."""
    records: list[Record] = []
    length = 0
    try:
        lines = read_regular(path).splitlines(keepends=True)
    except FileNotFoundError:
        return records, length
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is None:
            if number == len(lines):
                break
            raise RunError(
                f"{path}: line {number} of {len(lines)} is damaged.",
                remedy="Restore the run folder from a copy, or start the run again in a new folder.",
                code="journal-damaged",
            )
        records.append(record)
        length += len(line)
    return records, length


def _parse(line: bytes) -> Record | None:
    try:
        entry = parse_json(line)
        record: Record = entry["record"]
        is_intact = line == _line(record)
        record = {"type" if name == _OLD_TYPE else name: value for name, value in record.items()}
        # `type` instead of isinstance, because bool is a subclass of int.
        is_record = isinstance(record["type"], str) and type(record.get("step", 0)) is int
        return record if is_intact and is_record else None
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
        return None
