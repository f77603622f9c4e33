"""Rows of a data file: jsonl, json, csv or tsv in UTF-8, or parquet, with their numbers.

A row's number is its line in a jsonl file, else its place, in csv and tsv after the header, all from 1. A
json file is a list of rows, or of texts, which are rows with the column text; or it is jsonl by another name.
A tsv whose header has no quotes is read without quoting, as SST-2's files need: their texts hold quotes.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from prge.errors import LONGEST_LINE, ConfigError, DataError, shortened
from prge.files.documents import DocumentError, parse_json
from prge.host.packages import install_extra
from prge.rows.feedback import whole_lines

JSON, PARQUET = ".json", ".parquet"
LINES = (".jsonl", ".ndjson")
FORMATS = (*LINES, JSON, ".csv", ".tsv", PARQUET)
UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
LONGEST_FIELD = 2**31 - 1

Item = TypeVar("Item")


@dataclass(frozen=True)
class Row:
    """One row of a data file: its number there, from 1, and its columns."""

    number: int
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Selection:
    """Which rows of a file to use."""

    start: int = 0
    """Rows to leave out at the beginning."""
    limit: int | None = None
    """Most rows to use; all where absent."""
    shuffle_seed: int | None = None
    """Shuffle the whole file first, the same way on every machine; file order where absent."""

    def __post_init__(self) -> None:
        problems = []
        if self.start < 0:
            problems.append(f"start is {self.start}, must be at least 0")
        if self.limit is not None and self.limit < 1:
            problems.append(f"limit is {self.limit}, must be at least 1")
        if self.shuffle_seed is not None and not 0 <= self.shuffle_seed < 2**64:
            problems.append(f"shuffle_seed is {self.shuffle_seed}, must be from 0 to 2**64 - 1")
        if problems:
            raise ConfigError("the selection of rows can't be used", problems)


def read_rows(path: Path | str, broken: list[str] | None = None) -> list[Row]:
    """Read every row of a file of one of the `FORMATS`.

    Args:
        path: of the file.
        broken: takes what is wrong with broken rows, which are left out then.

    Raises:
        DataError: no such file, another format or encoding, no rows, or broken rows (all are named).
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise DataError(
            f"{path} can't be read as data",
            [f"its name ends in {suffix!r}, known are {', '.join(FORMATS)}"],
            remedy="convert or rename the file",
        )
    if not path.is_file():
        raise DataError(f"{path} can't be read as data", ["there is no such file"], remedy="check the path")
    problems: list[str] = [] if broken is None else broken
    text = "" if suffix == PARQUET else read_text(path, whole=suffix in LINES)
    if suffix == PARQUET:
        rows = _parquet_rows(path)
    elif suffix == JSON and text.lstrip().startswith("["):
        rows = list(_listed_rows(text, problems))
    elif suffix in (*LINES, JSON):
        rows = list(_json_rows(text, problems))
    elif suffix == ".tsv" and '"' not in text.split("\n", 1)[0]:
        rows = list(_table_rows(_plain_records(text), problems))
    else:
        rows = list(_table_rows(_quoted_records(text, "\t" if suffix == ".tsv" else ","), problems))
    if problems and (broken is None or not rows):
        raise DataError(
            f"{path} has rows that can't be read", problems, remedy="correct or remove these rows"
        )
    if not rows:
        raise DataError(
            f"{path} can't be used", ["it has no rows"], remedy="give a file with at least one row"
        )
    return rows


def select_rows(rows: Sequence[Item], selection: Selection) -> list[Item]:
    """Shuffle, then leave out `start` rows, then take `limit`.

    Selections of one file with one seed and ranges apart share no row: rows for training and development.

    Raises:
        DataError: nothing is left.
    """
    order: Sequence[int] = range(len(rows))
    if selection.shuffle_seed is not None:
        # Raw bits of a counter-based generator are fixed by its definition; numpy's own shuffle is not.
        bits = np.random.Philox(key=np.array([selection.shuffle_seed, 0], np.uint64)).random_raw(len(rows))
        order = [int(index) for index in np.argsort(bits, kind="stable")]
    end = None if selection.limit is None else selection.start + selection.limit
    chosen = [rows[index] for index in order[selection.start : end]]
    if not chosen:
        raise DataError(
            "the selection leaves no rows",
            [f"the file has {len(rows)} rows, start is {selection.start}"],
            remedy="give a smaller start",
        )
    return chosen


def read_text(path: Path, whole: bool = False) -> str:
    """The text of a UTF-8 file; raises OSError, or DataError that tells where it isn't UTF-8.

    `whole`: a last line that a killed process left of feedback is left out.
    """
    content = path.read_bytes()
    content = whole_lines(content) if whole else content
    what, remedy = f"{path} is not UTF-8", "save the file as UTF-8"
    if content.startswith(UTF16_MARKS):
        raise DataError(what, ["byte 0: it begins as a UTF-16 file"], remedy=remedy)
    skipped = len(UTF8_MARK) if content.startswith(UTF8_MARK) else 0
    try:
        return content[skipped:].decode("utf-8")
    except UnicodeDecodeError as error:
        offset = error.start + skipped
        line = content.count(b"\n", 0, offset) + 1
        raise DataError(
            what, [f"line {line}, byte {offset} of the file: 0x{content[offset]:02x}"], remedy=remedy
        ) from None


def _json_rows(text: str, problems: list[str]) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = parse_json(line)
        except DocumentError as error:
            problems.append(f"row {number}: {error}")
        else:
            if isinstance(fields, dict):
                yield Row(number, fields)
            else:
                problems.append(
                    f"row {number}: is a JSON {_json_type(fields)}, must be an object with columns"
                )


def _listed_rows(text: str, problems: list[str]) -> Iterator[Row]:
    """The rows of a JSON list."""
    try:
        items = parse_json(text)
    except DocumentError as error:
        problems.append(str(error))
        return
    for number, item in enumerate(items, 1):
        if isinstance(item, dict):
            yield Row(number, item)
        elif isinstance(item, str):
            yield Row(number, {"text": item})
        else:
            problems.append(
                f"row {number}: is a JSON {_json_type(item)}, must be an object with columns, or a text"
            )


def _parquet_rows(path: Path) -> list[Row]:
    what = f"{path} can't be read as data"
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            what,
            ["parquet needs the package pyarrow, which is not installed"],
            remedy=f"{install_extra('data')}, or write the rows as jsonl",
        ) from None
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            what, [f"not parquet: {reason}"], remedy="write the file again, or as jsonl"
        ) from None
    twice = sorted(name for name, count in Counter(table.column_names).items() if count > 1)
    if twice:
        raise DataError(what, [f"it has columns twice: {', '.join(map(repr, twice))}"])
    return [Row(number, plain_value(fields)) for number, fields in enumerate(table.to_pylist(), 1)]


def plain_value(value: Any) -> Any:
    """A value with JSON's types alone; what else a table may hold, such as dates, as texts."""
    if isinstance(value, dict):
        return {str(name): plain_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain_value(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _json_type(value: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _plain_records(text: str) -> Iterator[tuple[int, list[str] | str]]:
    """Line number and fields of each line, split at tabs and nothing else."""
    for line, content in enumerate(text.split("\n"), 1):
        content = content.removesuffix("\r")
        if content:
            yield line, content.split("\t")


def _quoted_records(text: str, delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """Line number and fields of each record; a message in place of the fields where reading has to stop."""
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, f"not {'tsv' if delimiter != ',' else 'csv'}: {error}; nothing after it was read"
            return
        if record:
            yield line, record
        line = reader.line_num + 1


def _table_rows(records: Iterator[tuple[int, list[str] | str]], problems: list[str]) -> Iterator[Row]:
    header: list[str] | None = None
    names, number = "", 0
    for line, record in records:
        if isinstance(record, str):
            problems.append(
                f"row {number + 1} (line {line}): {record}" if header else f"line {line}: {record}"
            )
        elif header is None:
            header = [name.strip() for name in record]
            names = shortened(", ".join(header), LONGEST_LINE)
            twice = sorted(name for name, count in Counter(header).items() if count > 1 or not name)
            if twice:
                problems.append(
                    f"line {line}: the header has empty or repeated columns: {', '.join(map(repr, twice))}"
                )
        else:
            number += 1
            if len(record) != len(header):
                problems.append(
                    f"row {number} (line {line}): has {len(record)} fields, the header names {len(header)}: "
                    + names
                )
            else:
                yield Row(number, dict(zip(header, record, strict=True)))
