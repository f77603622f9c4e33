"""Types of settings: conversion of values from flags and YAML, and descriptions of types for users."""

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

# A number of bytes; users may give a unit, such as 200MB.
Bytes = NewType("Bytes", int)
# One path, or several if several words are given.
Paths: TypeAlias = Path | tuple[Path, ...]
# A date in ISO 8601.
Day = NewType("Day", str)

Mark = TypeVar("Mark")

# Exceptions of `convert_value`.
CONVERSION_ERRORS = (AttributeError, TypeError, ValueError, OverflowError)
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kMG])(i?)B|B?)", re.IGNORECASE)


class _Type(NamedTuple):
    """How messages and help describe a type, and which Python types are accepted for it."""

    description: str
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
    """Convert a numpy scalar or array to Python's own type; return any other value unchanged."""
    # Doesn't import numpy, which most commands don't need.
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value


def convert_value(value: Any, field_type: Any) -> Any:
    """Convert a value from a flag, YAML or Python to its field's type; raises one of `CONVERSION_ERRORS`."""
    value = to_python_value(value)
    origin, arguments = get_origin(field_type), get_args(field_type)
    if len(_members(field_type)) > 1:
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
    if field_type not in _TYPES or not isinstance(value, _TYPES[field_type].accepted):
        raise TypeError
    if isinstance(value, bool) != (field_type is bool):  # bool is a subclass of int
        raise TypeError
    if field_type is Path and (value == "" or "\0" in str(value)):  # Path("") is the current folder
        raise TypeError
    if field_type is Day:
        return date.fromisoformat(value).isoformat()
    return _parse_bytes(str(value)) if field_type is Bytes else field_type(value)


def is_list_type(field_type: Any) -> bool:
    """Return whether a flag of this type takes several values."""
    return any(get_origin(member) in (list, tuple) for member in _members(field_type))


def contains_path_type(field_type: Any) -> bool:
    """Return whether values of this type are paths or contain paths."""
    return field_type is Path or any(map(contains_path_type, get_args(field_type)))


def find_marks(settings_type: type[Any], mark: type[Mark]) -> dict[str, Mark]:
    """Return the annotations of one class that the types of settings carry, by the settings' names."""
    hints = get_type_hints(settings_type, include_extras=True)
    return {
        item.name: each
        for item in dataclasses.fields(settings_type)
        for each in _marks(hints[item.name], mark)
    }


def list_choices(field_type: Any) -> list[str]:
    """Return the allowed values of a Literal type; empty for other types."""
    literals = [member for member in _members(field_type) if get_origin(member) is Literal]
    return [each for literal in literals for each in get_args(literal)]


def describe_type(field_type: Any) -> str:
    """Describe a type to users, such as `a whole number`."""
    origin, arguments = get_origin(field_type), get_args(field_type)
    if len(_members(field_type)) > 1:
        return " or ".join(map(describe_type, arguments))
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin in (list, tuple):
        return f"a list of {describe_type(arguments[0]).removeprefix('a ')}s"
    return _TYPES[field_type].description if field_type in _TYPES else "a mapping"


def metavar(field_type: Any) -> str:
    """Return the placeholder for a value in help."""
    if get_origin(field_type) is Literal:
        return "{" + ",".join(get_args(field_type)) + "}"
    if is_list_type(field_type) and len(_members(field_type)) == 1:
        return f"{metavar(get_args(field_type)[0])}..."
    if len(_members(field_type)) > 1:
        several = "..." if Path in get_args(field_type) and is_list_type(field_type) else ""
        return metavar(get_args(field_type)[0]) + several
    return _TYPES[field_type].metavar if field_type in _TYPES else "VALUE"


def _marks(field_type: Any, mark: type[Mark]) -> Iterator[Mark]:
    yield from (each for each in getattr(field_type, "__metadata__", ()) if isinstance(each, mark))
    for member in get_args(field_type):
        yield from _marks(member, mark)


def _members(field_type: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the type alone."""
    return get_args(field_type) if get_origin(field_type) in (Union, types.UnionType) else (field_type,)


def _parse_bytes(text: str) -> int:
    """Parse a number of bytes with an optional unit: kB is 1,000 bytes, KiB 1,024; raises ValueError."""
    match = _BYTES.fullmatch(text)
    if match is None:
        return int(text)
    number, prefix, binary = match.groups()
    power = " kmg".index((prefix or " ").lower())
    return int(float(number) * (1024 if binary else 1000) ** power) if prefix else int(number)
