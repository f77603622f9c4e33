"""Reading of untrusted JSON and YAML, within bounds that make the values safe to print, hash and traverse.

A document is a regular file of bounded size. Its values are strings, finite numbers, true, false, null, lists
and mappings, nested at most `DEEPEST` levels deep; no mapping has duplicate keys. YAML aliases are rejected;
YAML dates and YAML's base-60 and octal numbers are strings.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from prge.errors import format_value
from prge.system.regular_files import open_regular

MAX_JSON_BYTES = 2 << 20
MAX_YAML_BYTES = 64 << 10
DEEPEST = 32
_TOO_DEEP = f"it has more than {DEEPEST} levels of lists and mappings"
LONGEST_NUMBER = 100
_UTF8_MARK = "\ufeff"
_SPACE = re.compile(r"[ \t\r\n]*")
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


class DocumentError(ValueError):
    """A document is invalid; the message follows its name. `code`: see PrgeError."""

    def __init__(self, what: str, *, code: str = "") -> None:
        super().__init__(what)
        self.code = code


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES, infinite: bool = False) -> Any:
    """Read a JSON file; raises OSError or DocumentError. `infinite`: whether numbers may be infinite."""
    return parse_json(read_document(path, max_bytes), infinite)


def read_yaml(path: Path) -> Any:
    """Read a YAML file; raises OSError or DocumentError."""
    return parse_yaml(read_document(path, MAX_YAML_BYTES))


def read_document(path: Path, max_bytes: int) -> bytes:
    """Read a regular file; raises OSError, or DocumentError if it is larger than `max_bytes`."""
    with open_regular(path, "rb", follow=True) as stream:
        size = os.fstat(stream.fileno()).st_size
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DocumentError(
            f"it has {max(size, len(content))} bytes, at most {max_bytes} are read",
            code="document-too-large",
        )
    return content


def parse_json(content: bytes | str, infinite: bool = False) -> Any:
    """Parse a JSON text in UTF-8; raises DocumentError. The caller has to limit its size."""
    return _parsed(_decoded(content), (_WITH_INFINITY if infinite else _DECODER).decode)


def parse_json_values(text: str) -> list[Any]:
    """Parse a text of consecutive JSON values, as `jq` prints them; see `parse_json`."""
    values: list[Any] = _parsed(text, _consecutive)
    return values


def _consecutive(text: str) -> list[Any]:
    values, end = [], _SPACE.match(text).end()  # type: ignore[union-attr]
    while end < len(text):
        value, end = _DECODER.raw_decode(text, end)
        values.append(value)
        end = _SPACE.match(text, end).end()  # type: ignore[union-attr]
    return values


def _parsed(text: str, decode: Callable[[str], Any]) -> Any:
    try:
        value = decode(text)
        # An unpaired surrogate escape is legal in JSON, but can't be encoded in UTF-8.
        if _HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        deep = _is_deep(value)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise DocumentError(
            f"not JSON: {error.msg} at {line}character {error.colno}", code="json-malformed"
        ) from None
    except UnicodeEncodeError:
        raise DocumentError("it has half of a \\u escape pair", code="half-character") from None
    except RecursionError:
        deep = True
    if deep:
        raise DocumentError(_TOO_DEEP, code="document-too-deep")
    return value


def parse_yaml(content: bytes | str) -> Any:
    """Parse a YAML text in UTF-8; raises DocumentError. The caller has to limit its size."""
    # Imported here, because most verbs don't read YAML.
    import yaml

    text = _decoded(content)
    try:
        loader = _yaml_loader()
        _check_events(text, loader)
        value = yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        # PyYAML 6.0.4 limits the depth itself, before it emits the first event.
        if "nesting depth" in str(error.problem):
            raise DocumentError(_TOO_DEEP, code="document-too-deep") from None
        mark = error.problem_mark or error.context_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise DocumentError(
            f"not YAML: {position}{error.problem or error.context}", code="yaml-malformed"
        ) from None
    except yaml.YAMLError as error:
        raise DocumentError(f"not YAML: {' '.join(str(error).split())}", code="yaml-malformed") from None
    except DocumentError:
        raise
    except ValueError:  # from Python's int and float
        raise DocumentError(
            "it has a number that is none, or one of thousands of digits", code="number-unreadable"
        ) from None
    _check_numbers_and_texts(value)
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping, else an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def _decoded(content: bytes | str) -> str:
    try:
        text = content.decode() if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"it is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}", code="not-utf8"
        ) from None
    return text.removeprefix(_UTF8_MARK)


def _without_duplicate_keys(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a mapping of pairs; raises DocumentError for duplicate keys."""
    value = dict(pairs)
    if len(value) < len(pairs):
        duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise DocumentError(f"it has the key {format_value(duplicate)} twice", code="key-twice")
    return value


def _mapping_of_yaml(loader: Any, node: Any) -> dict[Any, Any]:
    pairs = loader.construct_pairs(node, deep=True)
    if any(isinstance(key, (list, dict)) for key, _ in pairs):
        raise DocumentError("it has a list or a mapping as a key", code="key-not-scalar")
    return _without_duplicate_keys(pairs)


def _whole_number(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise DocumentError(f"it has a number of {len(text)} digits", code="number-too-long")
    return int(text)


def _number(text: str) -> float:
    return _finite(float(text), text)


def _finite(value: float, text: object) -> float:
    if not math.isfinite(value):
        raise DocumentError(
            f"it has {format_value(text)}, which is no finite number", code="number-not-finite"
        )
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise DocumentError(f"it has {text}, which is no number of JSON", code="number-not-finite")


def _infinity(name: str) -> float:
    return float(name) if "Infinity" in name else _refuse_constant(name)


_decoder = partial(
    json.JSONDecoder, parse_float=_number, parse_int=_whole_number, object_pairs_hook=_without_duplicate_keys
)
_WITH_INFINITY = _decoder(parse_constant=_infinity)
_DECODER = _decoder(parse_constant=_refuse_constant)


def _is_deep(value: object) -> bool:
    """Return whether a value is nested more than `DEEPEST` levels deep."""
    level: list[object] = [value]
    for _ in range(DEEPEST):
        level = [
            *(inner for outer in level if isinstance(outer, list) for inner in outer),
            *(inner for outer in level if isinstance(outer, dict) for inner in outer.values()),
        ]
    return any(isinstance(inner, (list, dict)) for inner in level)


def _yaml_loader() -> type[Any]:
    """Return a YAML loader for the types of JSON only, in C if PyYAML has it."""
    import yaml

    global _loader
    if _loader is None:
        base: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        types = ("null", "bool", "int", "float", "str", "seq", "map")
        tags = [f"tag:yaml.org,2002:{name}" for name in types]
        constructors = {tag: base.yaml_constructors[tag] for tag in tags} | {
            None: base.yaml_constructors[None]
        }
        constructors["tag:yaml.org,2002:map"] = _mapping_of_yaml
        resolvers = {
            first: [(tag, _decimal(tag, pattern)) for tag, pattern in patterns if tag in tags]
            for first, patterns in base.yaml_implicit_resolvers.items()
        }
        _loader = type(
            "PlainLoader", (base,), {"yaml_constructors": constructors, "yaml_implicit_resolvers": resolvers}
        )
    return _loader


def _decimal(tag: str, pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return YAML 1.1's pattern of numbers, without base 60 (1:30) and octal (010) numbers."""
    if not tag.endswith((":int", ":float")):
        return pattern
    return re.compile(rf"(?!.*:|[-+]?0[0-9_]+$){pattern.pattern}", pattern.flags)


_loader: type[Any] | None = None


def _check_events(text: str, loader: type[Any]) -> None:
    """Raise DocumentError for deep nesting and aliases, before values are constructed.

    Construction is recursive, and aliases can expand to any size.
    """
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            raise DocumentError(
                f"it has an alias, *{event.anchor}: write out what it stands for", code="yaml-alias"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEEPEST:
                raise DocumentError(_TOO_DEEP, code="document-too-deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_numbers_and_texts(value: object) -> None:
    """Raise DocumentError for numbers that are infinite or too long, and strings that can't be encoded."""
    if isinstance(value, dict):
        for key, each in value.items():
            _check_numbers_and_texts(key)
            _check_numbers_and_texts(each)
    elif isinstance(value, list):
        for each in value:
            _check_numbers_and_texts(each)
    elif isinstance(value, float):
        _finite(value, value)
    elif isinstance(value, int) and value.bit_length() > 4 * LONGEST_NUMBER:
        raise DocumentError("it has a number of more than a hundred digits", code="number-too-long")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DocumentError("it has half of a \\u escape pair", code="half-character") from None
