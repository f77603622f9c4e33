"""Append-only record of a run: what every step learnt, enough to make the adapter again.

One JSON object a line, each with the CRC-32 of its content. A line is complete or it never was: a torn last
line (a kill, a full disk) is dropped, a damaged line in the middle is an error.

    {"kind": "start", ...}       what the run is: settings, bundle, seed
    {"kind": "head", ...}        an encoder's fitted head
    {"kind": "step", ...}        rows, scalars or gradient, learning rate, loss
    {"kind": "evaluation", ...}  loss and metric on development rows before a step
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
from prge.files.documents import parse_json
from prge.host.atomic import storage_error, write_file
from prge.host.regular_files import open_regular, read_regular

Record = dict[str, Any]
# Of a step's record: a gradient as it is, megabytes of a large adapter.
GRADIENT = "gradient"


class Journal:
    """The journal of one run, opened for appending, or for reading alone while its run may still write.

    Raises:
        RunError: a line other than the last is damaged, or the file can't be written.
    """

    def __init__(self, path: Path, writable: bool = True) -> None:
        self.path = path
        self._stream: BinaryIO | None = None
        # Whether the file has a part of a line that couldn't be written, nor taken back.
        self._is_torn = False
        # What lay beside a journal that is new.
        self._beside = None if not writable or os.path.lexists(path) else _names(path)
        try:
            self.records, self._length = _read(path)
            if writable:
                self._stream = open_regular(path, "ab", buffering=0)
                self._stream.truncate(self._length)
        except OSError as error:
            raise storage_error(path, error) from None
        self._at = {(record["kind"], record.get("step")): record for record in self.records}

    def first(self, kind: str) -> Record | None:
        """The first record of a kind."""
        return next((record for record in self.records if record["kind"] == kind), None)

    def step(self, step: int) -> Record | None:
        """The record of a step that was already taken."""
        return self._at.get(("step", step))

    def evaluation(self, step: int) -> Record | None:
        """The evaluation already made before a step."""
        return self._at.get(("evaluation", step))

    @property
    def steps(self) -> int:
        """Steps that the run has taken."""
        return sum(kind == "step" for kind, _ in self._at)

    def append(self, record: Record) -> Record:
        """Write one record; it survives a kill of the process from here on.

        Raises:
            RunError: no space left, or another failure of the file system; the journal stays whole.
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
        self._at[record["kind"], record.get("step")] = record
        return record

    def forget_gradients(self, before: int) -> None:
        """Leave out the gradients of steps before one, because a checkpoint has what came of them.

        A kill leaves the file as it was, or as it is to be.

        Raises:
            RunError: as `append`.
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

    def undo_after(self, kept: int) -> None:
        """Leave out all but the first `kept` records, of something that was begun and not finished."""
        if kept == len(self.records) or self._stream is None:
            return
        del self.records[kept:]
        self._length = sum(len(_line(record)) for record in self.records)
        self._stream.truncate(self._length)
        self._at = {(record["kind"], record.get("step")): record for record in self.records}

    @contextlib.contextmanager
    def reading(self, record: Record) -> Iterator[None]:
        """Use a record that the journal held; RunError if it lacks something or has it otherwise."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            where = " ".join(str(record[name]) for name in ("kind", "step") if name in record)
            raise RunError(
                f"{self.path}: the record {where!r} can't be used: {type(error).__name__}: {error}",
                remedy="restore the run folder from a copy, or start the run again in a new folder",
                code="journal-damaged",
            ) from error

    def sync(self) -> None:
        """Force what was written to the disk, so that it survives a power cut too."""
        if self._stream is not None:
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file; the object can still be read.

        A journal that was made here is removed if it got no record and nothing else was made beside it.
        """
        if self._stream is None:
            return
        self._stream.close()
        is_empty = self._beside is not None and not self._length and not self._is_torn
        if is_empty and _names(self.path) == self._beside:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode_array(values: FloatArray) -> str:
    """Exact text form of f32 values: base64 of their little-endian bytes."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def decode_array(text: str) -> FloatArray:
    """Inverse of `encode_array`, f32 [n]."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)


def _line(record: Record) -> bytes:
    # Python prints the shortest decimal that reads back as the same double: scalars survive exactly.
    content = json.dumps(record, separators=(",", ":"), allow_nan=False)
    return f'{{"crc32":"{zlib.crc32(content.encode()):08x}","record":{content}}}\n'.encode()


def _names(path: Path) -> set[str]:
    """Names beside a file; none where its folder can't be read."""
    try:
        return {*os.listdir(path.parent)} - {path.name}
    except OSError:
        return set()


def _read(path: Path) -> tuple[list[Record], int]:
    """Whole records of a journal file and the length of the part that holds them."""
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
                f"{path}: line {number} of {len(lines)} is damaged",
                remedy="restore the run folder from a copy, or start the run again in a new folder",
                code="journal-damaged",
            )
        records.append(record)
        length += len(line)
    return records, length


def _parse(line: bytes) -> Record | None:
    try:
        entry = parse_json(line)
        record: Record = entry["record"]
        whole = line == _line(record) and isinstance(record["kind"], str)
        # bool is an int too
        return record if whole and type(record.get("step", 0)) is int else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
