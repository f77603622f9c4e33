"""Rows of a data file: jsonl, json, csv or tsv in UTF-8, or parquet, with their numbers.

A row's number is its line in a jsonl file, else its position from 1, in csv and tsv after the header.
json_rows.py lists what a file of JSON may hold, whatever its name. A tsv file whose header has no quotes is
read without quoting, which SST-2's files need because their texts have quotes. A column without a name, such
as the index that pandas writes, gets pandas' name: `Unnamed: 0`.

A null counts as a missing column, since `datasets` gives every row the columns of all rows.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from prge.data.readers.feedback import whole_lines
from prge.data.readers.json_rows import numbered_items
from prge.data.readers.parquet import ROW_BYTES, check_expansion, parquet_rows
from prge.errors import LONGEST_VALUE, ConfigError, DataError, shortened

JSON, PARQUET = ".json", ".parquet"
LINES = (".jsonl", ".ndjson")
FORMATS = (*LINES, JSON, ".csv", ".tsv", PARQUET)
UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
LONGEST_FIELD = 2**31 - 1

Part = Literal["train", "dev", "test"]
# Names of a part's file in a folder, of its split in a data set, and of its rows in a JSON object.
PART_NAMES: Mapping[Part, tuple[str, ...]] = {
    "train": ("train",),
    "dev": ("valid", "validation", "dev", "val"),
    "test": ("test",),
}
ALL_PART_NAMES = [name for names in PART_NAMES.values() for name in names]

Item = TypeVar("Item")


class RowNumber(int):
    """The number of a row of several files: unique as an integer; as text, such as `2 of b.jsonl`."""

    def __new__(cls, value: int, in_file: int, file: str) -> RowNumber:
        """Create the number.

        Args:
            value: unique number among all files.
            in_file: number of the row in its file, from 1.
            file: path of the file.
        """
        number = super().__new__(cls, value)
        number.in_file, number.file = in_file, file
        return number

    in_file: int
    file: str

    def __str__(self) -> str:
        return f"{self.in_file} of {self.file}"

    def __getnewargs__(self) -> tuple[int, int, str]:  # type: ignore[override]
        return int(self), self.in_file, self.file


def row_location(number: int) -> dict[str, Any]:
    """Return a row's number as the field `row` for JSON, with the field `file` if there are several files."""
    if isinstance(number, RowNumber):
        return {"file": number.file, "row": number.in_file}
    return {"row": number}


@dataclass(frozen=True)
class Row:
    """One row of a data file: its number from 1, and its columns.

    Values are those of JSON. Tables may have others, such as dates or bytes, but not in columns that are
    read.
    """

    number: int
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Selection:
    """Which rows of a file are used."""

    start: int = 0
    """Number of rows to skip at the beginning."""
    limit: int | None = None
    """Maximum number of rows; None for all."""
    shuffle_seed: int | None = None
    """Seed to shuffle the whole file first, with the same result on every machine; None for file order."""

    def __post_init__(self) -> None:
        problems = []
        if self.start < 0:
            problems.append(f"start is {self.start}, must be at least 0")
        if self.limit is not None and self.limit < 1:
            problems.append(f"limit is {self.limit}, must be at least 1")
        if self.shuffle_seed is not None and not 0 <= self.shuffle_seed < 2**64:
            problems.append(f"shuffle_seed is {self.shuffle_seed}, must be from 0 to 2**64 - 1")
        if problems:
            raise ConfigError("The selection of rows can't be used:", problems, code="selection-unusable")


def read_rows(path: Path | str, broken: list[str] | None = None, part: Part = "train") -> list[Row]:
    """Read all rows of a file in one of the `FORMATS`.

    Args:
        path: the file.
        broken: A list to which the problems of broken rows are appended, which are skipped then.
        part: the part to read of a JSON object with rows under `train`, `valid` and `test`.

    Raises:
        DataError: the file doesn't exist, has another format or encoding, no rows, or broken rows, all of
            which the error lists.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise DataError(
            f"{path} can't be read as data:",
            [f"its name ends in {suffix!r}; known formats are {', '.join(FORMATS)}"],
            remedy="Convert or rename the file.",
            code="file-format",
        )
    if not path.is_file():
        raise DataError(
            f"{path} can't be read as data:",
            ["there is no such file"],
            remedy="Check the path.",
            code="file-missing",
        )
    problems: list[str] = [] if broken is None else broken
    text = "" if suffix == PARQUET else read_text(path, whole=suffix in LINES)
    numbered: Iterator[tuple[int, Mapping[str, Any]]]
    if suffix == PARQUET:
        numbered = enumerate(map(table_value, parquet_rows(path)), 1)
    elif suffix in (*LINES, JSON):
        numbered = numbered_items(text, problems, PART_NAMES[part], ALL_PART_NAMES)
    elif suffix == ".tsv" and '"' not in text.split("\n", 1)[0]:
        numbered = _table_rows(_plain_records(text), problems)
    else:
        numbered = _table_rows(_quoted_records(text, "\t" if suffix == ".tsv" else ","), problems)
    size, rows = path.stat().st_size, []
    for number, fields in numbered:
        rows.append(Row(number, without_nulls(fields)))
        check_expansion(path, size, ROW_BYTES * len(rows))
    if problems and (broken is None or not rows):
        raise DataError(
            f"{path} has rows that can't be read:",
            problems,
            remedy="Correct or remove these rows.",
            code="rows-unreadable",
        )
    if not rows:
        raise DataError(
            f"{path} can't be used:",
            ["it has no rows"],
            remedy="Give a file with at least one row.",
            code="rows-empty",
        )
    return rows


def select_rows(rows: Sequence[Item], selection: Selection) -> list[Item]:
    """Shuffle rows, then skip `start` rows, then take `limit` rows.

    Selections with the same seed and disjoint ranges share no row, so they can split training and
    development.

    Raises:
        DataError: no row is left.
    """
    order: Sequence[int] = range(len(rows))
    if selection.shuffle_seed is not None:
        # The raw bits of Philox are fixed by its definition; numpy's own shuffle may change.
        bits = np.random.Philox(key=np.array([selection.shuffle_seed, 0], np.uint64)).random_raw(len(rows))
        order = [int(index) for index in np.argsort(bits, kind="stable")]
    end = None if selection.limit is None else selection.start + selection.limit
    chosen = [rows[index] for index in order[selection.start : end]]
    if not chosen:
        raise DataError(
            "The selection leaves no rows:",
            [f"the file has {len(rows)} rows, start is {selection.start}"],
            remedy="Give a smaller start.",
            code="selection-empty",
        )
    return chosen


def read_text(path: Path, whole: bool = False) -> str:
    """Read a UTF-8 file; raises OSError, or DataError with the position of invalid bytes.

    With `whole`, an incomplete last line of feedback is left out.
    """
    content = path.read_bytes()
    content = whole_lines(content) if whole else content
    what, remedy = f"{path} is not UTF-8:", "Save the file as UTF-8."
    if content.startswith(UTF16_MARKS):
        raise DataError(what, ["byte 0: it begins as a UTF-16 file"], remedy=remedy, code="not-utf8")
    skipped = len(UTF8_MARK) if content.startswith(UTF8_MARK) else 0
    try:
        return content[skipped:].decode("utf-8")
    except UnicodeDecodeError as error:
        offset = error.start + skipped
        line = content.count(b"\n", 0, offset) + 1
        raise DataError(
            what,
            [f"line {line}, byte {offset} of the file: 0x{content[offset]:02x}"],
            remedy=remedy,
            code="not-utf8",
        ) from None


def table_value(value: Any) -> Any:
    """Convert a value of a table: UTF-8 bytes become text, and NaN becomes null.

    Other values without a JSON type are kept, so that columns which must be texts refuse them.
    """
    if isinstance(value, dict):
        return {str(name): table_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [table_value(each) for each in value]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value
    return None if isinstance(value, float) and math.isnan(value) else value


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's columns without nulls."""
    return {name: value for name, value in fields.items() if value is not None}


def json_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those columns of a row that JSON can represent."""
    return {name: value for name, value in fields.items() if _is_json(value)}


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _plain_records(text: str) -> Iterator[tuple[int, list[str] | str]]:
    """Yield line number and fields of each line, split at tabs only."""
    for line, content in enumerate(text.split("\n"), 1):
        content = content.removesuffix("\r")
        if content:
            yield line, content.split("\t")


def _quoted_records(text: str, delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """Yield line number and fields of each record; instead of the fields, a message if reading must stop."""
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield (
                line,
                f"not {'tsv' if delimiter != ',' else 'csv'}: {error}; the rest of the file was not read",
            )
            return
        if record:
            yield line, record
        line = reader.line_num + 1


def _table_rows(
    records: Iterator[tuple[int, list[str] | str]], problems: list[str]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    header: list[str] | None = None
    names, number = "", 0
    for line, record in records:
        if isinstance(record, str):
            problems.append(
                f"row {number + 1} (line {line}): {record}" if header else f"line {line}: {record}"
            )
        elif header is None:
            header = [name.strip() or f"Unnamed: {index}" for index, name in enumerate(record)]
            names = shortened(", ".join(header), LONGEST_VALUE)  # shortened, since there may be many problems
            twice = sorted(name for name, count in Counter(header).items() if count > 1)
            if twice:
                problems.append(f"line {line}: the header repeats columns: {', '.join(map(repr, twice))}")
        else:
            number += 1
            if len(record) != len(header):
                problems.append(
                    f"row {number} (line {line}): has {len(record)} fields, the header names {len(header)}: "
                    + names
                )
            else:
                yield number, dict(zip(header, record, strict=True))
