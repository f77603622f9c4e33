"""Columns of rows: reading their values, and formatting their names for users."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from prge.data.readers.files import Row
from prge.errors import format_value, printable, shortened
from prge.formats.documents import DocumentError, parse_json

LONGEST_COLUMNS = 300
Fields = Mapping[str, Any]


class RowError(ValueError):
    """A problem with one row, to which the caller adds the row's number; `code` is as for PrgeError."""

    def __init__(self, what: str, *, code: str = "") -> None:
        super().__init__(what)
        self.code = code


def get_text(fields: Fields, column: str) -> str:
    """Return the text of a column; raises RowError if it is missing or not a text."""
    value = fields.get(column)
    if not isinstance(value, str):
        problem, code = (
            ("missing", "column-missing") if value is None else (type(value).__name__, "column-not-text")
        )
        raise RowError(f"column {column!r} is {problem}, must be a text", code=code)
    return value


def decode_column(column: str, value: Any, needed: str = "a list") -> Any:
    """Return the value of a column, parsed if it is JSON in a text, as in tables; raises RowError."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except DocumentError as error:
        raise RowError(
            f"{column} must be {needed}, or JSON of one, not {format_value(value)}: {error}",
            code="column-not-json",
        ) from None


def present_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns that any row has, in the order of their first occurrence."""
    return list(dict.fromkeys(column for row in rows for column in row.fields))


def format_column_names(columns: Collection[str]) -> str:
    """Format the names of columns for users."""
    return printable(shortened(", ".join(map(str, columns)), LONGEST_COLUMNS)) or "none"


def format_columns(
    read: Sequence[str], present: Sequence[str], renamed: Mapping[str, str], others: str = "not read"
) -> str:
    """Format which columns are read, from which columns of the file, and what the others are."""
    used = [column for column in present if column in read]
    names = [
        column if renamed.get(column, column) == column else f"{column} from {renamed[column]}"
        for column in used
    ]
    unread = [column for column in present if column not in used]
    return format_column_names(names) + (f"; {others}: {format_column_names(unread)}" if unread else "")
