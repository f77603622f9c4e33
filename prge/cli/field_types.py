"""Types of settings: what a value from a flag or from YAML becomes, and what a type is called."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import (
    Any,
    Literal,
    NamedTuple,
    NewType,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from prge.formats.documents import parse_yaml

# A number of bytes, which may be given with a unit: 200MB.
Bytes = NewType("Bytes", int)
# One path, or several where several words are given.
Paths: TypeAlias = Path | tuple[Path, ...]
# A date as ISO 8601 writes it.
Day = NewType("Day", str)

Mark = TypeVar("Mark")

# What `convert_value` raises.
CONVERSION_ERRORS = (AttributeError, TypeError, ValueError, OverflowError)
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kMG])(i?)B|B?)", re.IGNORECASE)


class _Type(NamedTuple):
    """What a type of values is called in messages and in help, and what may stand for it."""

    words: str
    metavar: str
    accepted: tuple[type[Any], ...]


_TYPES = {
    int: _Type("a whole number", "N", (int, str)),
    Bytes: _Type("a number of bytes, such as 200MB", "BYTES", (int, str)),
    float: _Type("a number", "X", (int, float, str)),
    bool: _Type("true or false", "", (bool,)),
    str: _Type("a text", "TEXT", (str,)),
    Day: _Type("a date, such as 2026-11-27", "DATE", (str,)),
    Path: _Type("a path", "PATH", (str, Path)),
    types.NoneType: _Type("null", "", ()),
}


def to_python_value(value: Any) -> Any:
    """Python's own number, truth value, text or list for numpy's; anything else as it is."""
    # Without importing numpy, which most commands don't need.
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value


def convert_value(value: Any, kind: Any) -> Any:
    """A value from a flag, from YAML or from Python as its field's type; raises one of `CONVERSION_ERRORS`."""
    value = to_python_value(value)
    origin, arguments = get_origin(kind), get_args(kind)
    if len(_members(kind)) > 1:
        if Path in arguments and isinstance(value, (list, tuple)):
            if not value:
                raise TypeError
            value = value[0] if len(value) == 1 else value
        if types.NoneType in arguments and value in (None, "null"):
            return None
        for member in arguments:
            with suppress(*CONVERSION_ERRORS):
                return convert_value(value, member)
        raise TypeError
    if origin is Literal and value in arguments:
        return value
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        return origin(convert_value(each, arguments[0]) for each in value)
    if origin is dict:
        entries = (parse_yaml(value) if isinstance(value, str) else value).items()
        return {
            convert_value(name, arguments[0]): convert_value(each, arguments[1]) for name, each in entries
        }
    if kind not in _TYPES or not isinstance(value, _TYPES[kind].accepted):
        raise TypeError
    if isinstance(value, bool) != (kind is bool):  # True is an int, too
        raise TypeError
    if kind is Path and (value == "" or "\0" in str(value)):  # "" would be the folder that one stands in
        raise TypeError
    if kind is Day:
        return date.fromisoformat(value).isoformat()
    return _bytes_of(str(value)) if kind is Bytes else kind(value)


def is_list_type(kind: Any) -> bool:
    """Whether several values belong to a flag."""
    return any(get_origin(member) in (list, tuple) for member in _members(kind))


def contains_path_type(kind: Any) -> bool:
    """Whether a value is a path, or has paths."""
    return kind is Path or any(map(contains_path_type, get_args(kind)))


def find_marks(settings_type: type[Any], mark: type[Mark]) -> dict[str, Mark]:
    """The marks of one class that the annotated types of settings carry, by the settings' names."""
    hints = get_type_hints(settings_type, include_extras=True)
    return {
        item.name: each
        for item in dataclasses.fields(settings_type)
        for each in _marks(hints[item.name], mark)
    }


def choices(kind: Any) -> list[str]:
    """The words that a value is one of; none where any may be given."""
    literals = [member for member in _members(kind) if get_origin(member) is Literal]
    return [each for literal in literals for each in get_args(literal)]


def describe_type(kind: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if len(_members(kind)) > 1:
        return " or ".join(map(describe_type, arguments))
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin in (list, tuple):
        return f"a list of {describe_type(arguments[0]).removeprefix('a ')}s"
    return _TYPES[kind].words if kind in _TYPES else "a mapping"


def metavar(kind: Any) -> str:
    """What stands for a value in help."""
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if is_list_type(kind) and len(_members(kind)) == 1:
        return f"{metavar(get_args(kind)[0])}..."
    if len(_members(kind)) > 1:
        several = "..." if Path in get_args(kind) and is_list_type(kind) else ""
        return metavar(get_args(kind)[0]) + several
    return _TYPES[kind].metavar if kind in _TYPES else "VALUE"


def _marks(kind: Any, mark: type[Mark]) -> Iterator[Mark]:
    yield from (each for each in getattr(kind, "__metadata__", ()) if isinstance(each, mark))
    for member in get_args(kind):
        yield from _marks(member, mark)


def _members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _bytes_of(text: str) -> int:
    """Bytes of a number with a unit: kB is 1,000 bytes, KiB 1,024; raises ValueError."""
    match = _BYTES.fullmatch(text)
    if match is None:
        return int(text)
    number, prefix, binary = match.groups()
    power = " kmg".index((prefix or " ").lower())
    return int(float(number) * (1024 if binary else 1000) ** power) if prefix else int(number)
