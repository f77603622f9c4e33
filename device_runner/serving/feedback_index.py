"""An index of the rows in a feedback file, extended as the file grows.

The rows stay in the file. Each entry has a row's key, a hash of its question, whether it can be trained on,
and its position.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from prge.data.forms.feedback_rows import has_positive_answer, prompt_key
from prge.data.readers.feedback import Fields, feedback_key, parse_feedback_line
from prge.system.regular_files import open_regular

# Limits of one call of `read_on`: seconds, and bytes per read.
SECONDS = 0.05
_BYTES = 1 << 20
# Larger than any row that a server writes.
_LONGEST_LINE = 32 << 20


class ChangedError(Exception):
    """Rows are not where they were: some were deleted, or the file was replaced."""


class IndexEntry(NamedTuple):
    """The index entry of a feedback row.

    Attributes:
        key: the key of the row.
        question: hash of the row's question.
        is_learnable: whether the row can be trained on.
        start: offset of the row's line in bytes.
        length: the length of the line in bytes.
    """

    key: str
    question: int
    is_learnable: bool
    start: int = 0
    length: int = 0

    @classmethod
    def of(cls, row: Fields, start: int = 0, length: int = 0) -> IndexEntry:
        """Return the entry of a row."""
        question = hashlib.sha256(prompt_key(row).encode()).digest()[:8]
        return cls(
            feedback_key(row), int.from_bytes(question, "big"), has_positive_answer(row), start, length
        )


class FeedbackIndex:
    """The valid rows of a feedback file, in order, without duplicates.

    A file that was replaced or truncated, as `prge rows forget` does, is read again; `generation` counts
    that. A missing file has no rows. All methods raise OSError. Used by one thread at a time.

    Args:
        path: the file.
        learns_ratings: whether bad answers can be trained on, too, as disliked ones.
    """

    def __init__(self, path: Path, learns_ratings: bool = False) -> None:
        self._path, self._learns_ratings = path, learns_ratings
        self._stream: BinaryIO | None = None
        self.generation = 0
        self._reset()

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the rows that were read so far."""
        return self._keys

    def __len__(self) -> int:
        """Return the number of rows that were read so far."""
        return len(self._keys)

    def __getitem__(self, number: int) -> IndexEntry:
        """Return the entry of a row by its zero-based number."""
        facts = self._keys[number], self._questions[number], bool(self._learnable[number])
        return IndexEntry(*facts, self._starts[number], self._lengths[number])

    def read_on(self) -> bool:
        """Read what was appended, for about `SECONDS`; return whether there is more to read."""
        self._reopen()
        if self._stream is None:
            return False
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if not self._read_lines(self._stream, deadline):
                return False
        return True

    def entries(self, keys: Sequence[str]) -> list[IndexEntry]:
        """Return the entries with these keys that the file has."""
        return [self[self._numbers[key]] for key in keys if key in self._numbers]

    def rows(self, keys: Sequence[str]) -> list[Fields]:
        """Return the rows with these keys.

        Raises:
            ChangedError: the file no longer has all of them.
        """
        generation = self.generation
        self._reopen()
        if self._stream is None or generation != self.generation:
            raise ChangedError
        entries = self.entries(keys)
        if len(entries) < len(keys):
            raise ChangedError
        try:
            return _rows_at(self._stream.fileno(), entries)
        except ChangedError:
            self._reset()
            raise

    def has_all(self, keys: Sequence[str]) -> bool:
        """Return whether the file, as it is now, has all rows with these keys."""
        try:
            self.rows(keys)
        except ChangedError:
            return False
        return True

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _reset(self) -> None:
        self.generation += 1
        self._end, self._is_inside_line = 0, False
        self._keys: list[str] = []
        self._numbers: dict[str, int] = {}
        self._questions, self._starts, self._lengths = array("Q"), array("Q"), array("Q")
        self._learnable = bytearray()

    def _reopen(self) -> None:
        """Open the current file. An open file keeps its inode number, so that a replacement differs."""
        try:
            current = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            current = None
        if self._stream is not None:
            opened = os.fstat(self._stream.fileno())
            if current is not None and os.path.samestat(current, opened) and opened.st_size >= self._end:
                return
            self.close()
            self._reset()
        if current is not None:
            self._stream = open_regular(self._path, "rb", buffering=0)

    def _read_lines(self, stream: BinaryIO, deadline: float) -> bool:
        """Read some lines; False if no whole line is left."""
        content = os.pread(stream.fileno(), _BYTES, self._end)
        while b"\n" not in content and _BYTES <= len(content) < _LONGEST_LINE:
            content = os.pread(stream.fileno(), 2 * len(content), self._end)
        if b"\n" not in content:
            if len(content) >= _LONGEST_LINE:
                self._end, self._is_inside_line = self._end + len(content), True
                return True
            # The last line may still be being written, or may lack a line break.
            if self._is_inside_line or parse_feedback_line(content) is None:
                return False
            self._take(content)
            return False
        for line in content.split(b"\n")[:-1]:
            if self._is_inside_line:
                self._end, self._is_inside_line = self._end + len(line) + 1, False
            else:
                self._take(line + b"\n")
            if time.monotonic() > deadline:
                break
        return True

    def _take(self, line: bytes) -> None:
        start, self._end = self._end, self._end + len(line)
        if (row := parse_feedback_line(line)) is None:
            return
        entry = IndexEntry.of(row, start, len(line))
        if entry.key in self._numbers:
            return
        self._numbers[entry.key] = len(self._keys)
        self._keys.append(entry.key)
        self._questions.append(entry.question)
        self._learnable.append(self._learns_ratings or entry.is_learnable)
        self._starts.append(entry.start)
        self._lengths.append(entry.length)


def read_rows(path: Path, entries: Sequence[IndexEntry]) -> list[Fields]:
    """Read the rows of index entries from a file.

    Raises:
        ChangedError: the rows are no longer there.
        OSError: the file can't be read.
    """
    try:
        with open_regular(path, "rb", buffering=0) as stream:
            return _rows_at(stream.fileno(), entries)
    except FileNotFoundError:
        raise ChangedError from None


def _rows_at(file: int, entries: Sequence[IndexEntry]) -> list[Fields]:
    rows = []
    for entry in entries:
        row = parse_feedback_line(os.pread(file, entry.length, entry.start))
        if row is None or feedback_key(row) != entry.key:
            raise ChangedError
        rows.append(row)
    return rows
