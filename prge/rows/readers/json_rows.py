"""Rows of a file of JSON, in whichever of the usual layouts they come.

{"text": "one"}                            jsonl: an object a line
[{"text": "one"}, {"text": "two"}]         a list of rows, or of texts, which become the column text
{"text": "one"} {"text": "two"}            objects one after another, over any lines, as jq prints
{"data": [...]}                            a list under one of the names of `_WRAPPERS`
{"train": [...], "test": [...]}            a list for each part, of which one is read
{"text": ["one", "two"]}                   columns, as `Dataset.to_dict` gives them
{"text": {"0": "one", "1": "two"}}         columns by index, as `DataFrame.to_json` writes them
{"columns": ["text"], "data": [["one"]]}   its orient="split"
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from prge.files.documents import DocumentError, parse_json, parse_json_values

# What people call a list of rows in an object that has nothing else of them.
_WRAPPERS = ("data", "rows", "examples", "instances", "records")
# How the first line of a value ends that goes on in the next one.
_OPEN = ("{", "[", ",", ":")
Numbered = Iterator[tuple[int, Mapping[str, Any]]]


def numbered_items(text: str, problems: list[str], part: Sequence[str], parts: Collection[str]) -> Numbered:
    """Rows with their numbers: lines of jsonl, else places, both from 1.

    Args:
        text: of the file.
        problems: takes what is wrong with rows that are left out.
        part: names of the part that is read of a file with several.
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
        yield from _of_lines(lines, problems)
        return
    try:
        items = values if len(values) > 1 else _of_document(values[0], part, parts)
    except DocumentError as error:
        problems.append(str(error))
        return
    yield from _of_items(enumerate(items, 1), problems)


def lists_of_parts(text: str, parts: Collection[str]) -> dict[str, Sequence[Any]]:
    """The lists of rows under names of parts, of a file that is one object; none of another file."""
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
    """The values of a file; None where each line is one. Raises DocumentError where neither can be."""
    if not lines:
        return None
    try:
        first = parse_json(lines[0][1])
    except DocumentError:
        return parse_json_values(text)
    return [first] if len(lines) == 1 else None


def _of_lines(lines: Sequence[tuple[int, str]], problems: list[str]) -> Numbered:
    """Rows of jsonl."""
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


def _of_items(items: Iterator[tuple[int, Any]], problems: list[str]) -> Numbered:
    for number, item in items:
        if isinstance(item, dict):
            yield number, item
        elif isinstance(item, str):
            yield number, {"text": item}
        else:
            problems.append(
                f"row {number}: is a JSON {_json_type(item)}, must be an object with columns, or a text"
            )


def _of_document(value: Any, part: Sequence[str], parts: Collection[str]) -> Sequence[Any]:
    """The rows of a file that is one value; raises DocumentError where it lacks the part that is read."""
    if not isinstance(value, dict):
        return value if isinstance(value, list) else [value]
    of_parts = {name: each for name, each in value.items() if name in parts and _are_rows(each)}
    if of_parts:
        named = [name for name in part if name in of_parts] if len(of_parts) > 1 else [*of_parts]
        if len(named) != 1:
            raise DocumentError(
                f"it has rows under {', '.join(of_parts)}, must have them under {' or '.join(part)}",
                code="part-missing",
            )
        return of_parts[named[0]]
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
    return _of_columns(value) or [value]


def _of_columns(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of columns of equal length, lists or mappings by index; none where they are no such columns."""
    columns = [*value.values()]
    if columns and all(isinstance(each, dict) and each for each in columns):
        index = [*columns[0]]
        if all(each.keys() == columns[0].keys() for each in columns) and all(map(str.isdigit, index)):
            return [{name: value[name][place] for name in value} for place in index]
    # Lists of objects alone are the messages of one row.
    if (
        columns
        and all(isinstance(each, list) for each in columns)
        and len({len(each) for each in columns}) == 1
        and not all(isinstance(item, dict) for each in columns for item in each)
    ):
        return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    return []


def _are_rows(value: object) -> bool:
    """Whether a value is a list of rows, or of texts."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict | str) for each in value)


def _json_type(value: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
