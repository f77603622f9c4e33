"""Reads rows from JSON in the usual layouts:

{"text": "one"}                            jsonl: an object a line
[{"text": "one"}, {"text": "two"}]         a list of rows, or of texts, which become the column text
{"text": "one"} {"text": "two"}            consecutive objects with any line breaks, as jq prints them
{"data": [...]}                            a list under one of the names in `_WRAPPERS`
{"train": [...], "test": [...]}            a list for each part, of which one is read
{"text": ["one", "two"]}                   columns, as `Dataset.to_dict` returns them
{"text": {"0": "one", "1": "two"}}         columns by index, as `DataFrame.to_json` writes them
{"columns": ["text"], "data": [["one"]]}   `DataFrame.to_json(orient="split")`
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from prge.formats.documents import DocumentError, parse_json, parse_json_values

# Usual names of the list of rows in an object.
_WRAPPERS = ("data", "rows", "examples", "instances", "records")
# Last characters of a first line whose value continues on the next line.
_OPEN = ("{", "[", ",", ":")
Numbered = Iterator[tuple[int, Mapping[str, Any]]]


def numbered_items(text: str, problems: list[str], part: Sequence[str], parts: Collection[str]) -> Numbered:
    """Yield rows with their numbers from 1: the line in jsonl, else the position.

    Args:
        text: content of the file.
        problems: A list to which the problems of skipped rows are appended.
        part: names of the part to read from a file with several parts.
        parts: names of all parts.
    """
    lines = _lines(text)
    values: list[Any] | None = None
    try:
        values = _values(text, lines)
    except DocumentError as error:
        if len(lines) > 1 and lines[0][1].rstrip().endswith(_OPEN):
            problems.append(str(error))
            return
    if values is None:
        yield from _rows_of_lines(lines, problems)
        return
    try:
        items = values if len(values) > 1 else _rows_of_document(values[0], part, parts)
    except DocumentError as error:
        problems.append(str(error))
        return
    yield from _rows_of_items(enumerate(items, 1), problems)


def lists_of_parts(text: str, parts: Collection[str]) -> dict[str, Sequence[Any]]:
    """Return the lists of rows under the names of parts, if the file is one object; else an empty mapping."""
    try:
        values = _values(text, _lines(text)) or []
    except DocumentError:
        return {}
    if len(values) != 1 or not isinstance(values[0], dict):
        return {}
    return {name: each for name, each in values[0].items() if name in parts and _are_rows(each)}


def _lines(text: str) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _values(text: str, lines: Sequence[tuple[int, str]]) -> list[Any] | None:
    """Parse the values of a file; return None for jsonl. Raises DocumentError if it is neither."""
    if not lines:
        return None
    try:
        first = parse_json(lines[0][1])
    except DocumentError:
        return parse_json_values(text)
    return [first] if len(lines) == 1 else None


def _rows_of_lines(lines: Sequence[tuple[int, str]], problems: list[str]) -> Numbered:
    """Yield the rows of jsonl."""
    for number, line in lines:
        try:
            fields = parse_json(line)
        except DocumentError as error:
            problems.append(f"row {number}: {error}")
        else:
            if isinstance(fields, dict):
                yield number, fields
            else:
                problems.append(
                    f"row {number}: is a JSON {_json_type(fields)}, must be an object with columns"
                )


def _rows_of_items(items: Iterator[tuple[int, Any]], problems: list[str]) -> Numbered:
    for number, item in items:
        if isinstance(item, dict):
            yield number, item
        elif isinstance(item, str):
            yield number, {"text": item}
        else:
            problems.append(
                f"row {number}: is a JSON {_json_type(item)}, must be an object with columns, or a text"
            )


def _rows_of_document(value: Any, part: Sequence[str], parts: Collection[str]) -> Sequence[Any]:
    """Return the rows of a file with one value; raises DocumentError if the part to read is missing."""
    if not isinstance(value, dict):
        return value if isinstance(value, list) else [value]
    part_lists = {name: each for name, each in value.items() if name in parts and _are_rows(each)}
    if part_lists:
        named = [name for name in part if name in part_lists] if len(part_lists) > 1 else [*part_lists]
        if len(named) != 1:
            raise DocumentError(
                f"it has rows under {', '.join(part_lists)}; expected them under {' or '.join(part)}",
                code="part-missing",
            )
        return part_lists[named[0]]
    columns, data = value.get("columns"), value.get("data")
    if isinstance(columns, list) and isinstance(data, list) and all(isinstance(each, list) for each in data):
        if any(len(each) != len(columns) for each in data):
            raise DocumentError(
                f"each list under data must have {len(columns)} values, as columns names", code="data-uneven"
            )
        return [dict(zip(map(str, columns), each, strict=True)) for each in data]
    wrapped = [name for name in _WRAPPERS if name in value and _are_rows(value[name])]
    if len(wrapped) == 1 and (len(value) == 1 or isinstance(value[wrapped[0]][0], dict)):
        rows: list[Any] = value[wrapped[0]]
        return rows
    return _rows_of_columns(value) or [value]


def _rows_of_columns(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of columns of equal length, lists or mappings by index; else an empty list."""
    columns = [*value.values()]
    if columns and all(isinstance(each, dict) and each for each in columns):
        index = [*columns[0]]
        if all(each.keys() == columns[0].keys() for each in columns) and all(map(str.isdigit, index)):
            return [{name: value[name][key] for name in value} for key in index]
    # If all columns are lists of objects, they are the messages of one row.
    if (
        columns
        and all(isinstance(each, list) for each in columns)
        and len({len(each) for each in columns}) == 1
        and not all(isinstance(item, dict) for each in columns for item in each)
    ):
        return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    return []


def _are_rows(value: object) -> bool:
    """Return whether a value is a non-empty list of rows or texts."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict | str) for each in value)


def _json_type(value: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
