"""Columns of rows: what they hold, which there are, and their names for a person to read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from prge.errors import printable, shortened, shown
from prge.files.documents import DocumentError, parse_json
from prge.rows.readers.files import Row

LONGEST_COLUMNS = 300
Fields = Mapping[str, Any]


class RowError(ValueError):
    """Something about one row; the caller adds the row's number. `code` is as of every PrgeError."""

    def __init__(self, what: str, *, code: str = "") -> None:
        super().__init__(what)
        self.code = code


def text_of(fields: Fields, column: str) -> str:
    """A column's text; raises RowError where it is missing, or no text."""
    value = fields.get(column)
    if not isinstance(value, str):
        problem, code = (
            ("missing", "column-missing") if value is None else (type(value).__name__, "column-not-text")
        )
        raise RowError(f"column {column!r} is {problem}, must be a text", code=code)
    return value


def decoded(column: str, value: Any, needed: str = "a list") -> Any:
    """What a column holds, which in a table may be JSON text; raises RowError."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except DocumentError as error:
        raise RowError(
            f"{column} must be {needed}, or JSON of one, not {shown(value)}: {error}", code="column-not-json"
        ) from None


def present_columns(rows: Sequence[Row]) -> list[str]:
    """Columns that some row has, in the order in which they come."""
    return list(dict.fromkeys(column for row in rows for column in row.fields))


def column_names(columns: Collection[str]) -> str:
    """Columns for a person to read."""
    return printable(shortened(", ".join(map(str, columns)), LONGEST_COLUMNS)) or "none"


def columns_text(read: Sequence[str], present: Sequence[str], renamed: Mapping[str, str]) -> str:
    """Which columns were read, from which of the file, and which were not."""
    used = [column for column in present if column in read]
    names = [
        column if renamed.get(column, column) == column else f"{column} from {renamed[column]}"
        for column in used
    ]
    left = [column for column in present if column not in used]
    return column_names(names) + (f"; not read: {column_names(left)}" if left else "")
