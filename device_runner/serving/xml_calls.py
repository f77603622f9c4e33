"""Calls of tools with a tag for each argument, as Qwen3-Coder and Qwen3.5 write them.

A text stands between its tags as it is, other values as JSON. The schema of a tool decides which one it is:
a phone number stays a text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from device_runner.serving.tool_calls import DECODER, Call, CallFormat, Tool, json_literals, match
from device_runner.session.grammars import JsonOf, OneOf, Part, TextUntil
from prge.errors import DataError, format_value

_JOINING = ("anyOf", "oneOf", "allOf")
_PARAMETER = re.compile(r"[^>\n]+")
# Most alternatives and references of a parameter that are followed for its types, and most of its options.
_MOST = 100


class XmlCalls(CallFormat):
    """A tag for each argument; texts stand between the tags as they are, other values as JSON."""

    signs = ("<tool_call>", "<function=", "<parameter=")
    begin = "<tool_call>"
    head = "<tool_call>\n<function="
    marks = ("<tool_call>", "</tool_call>")
    _function: ClassVar = re.compile(r"<function=([^>\n]+)>\s*")
    _argument: ClassVar = re.compile(
        rf"<parameter=({_PARAMETER.pattern})>\n?(.*?)\n?</parameter>\s*", re.DOTALL
    )
    _end: ClassVar = "</function>"

    def _read(self, text: str, at: int, tools: Mapping[str, Tool]) -> Call:
        function, arguments = match(self._function, text, at), dict[str, Any]()
        parameters = tools[function[1]].get("parameters", {})
        at = function.end()
        while not text.startswith(self._end, at):
            argument = match(self._argument, text, at)
            types = _types(_property(parameters, argument[1]), parameters)
            arguments[argument[1]] = _value(argument[2], types)
            at = argument.end()
        return function[1], arguments, at + len(self._end)

    def _call_of(self, tool: Tool) -> tuple[Part, ...]:
        parameters, parts = tool.get("parameters", {}), list[Part]([f"{tool['name']}>\n"])
        if key := next((key for key in ("$ref", *_JOINING) if key in parameters), None):
            raise _refused_error(tool, f"its parameters have {key}, but must be a plain object")
        required = _list(parameters.get("required"))
        for name in _object(parameters.get("properties")):
            if not _PARAMETER.fullmatch(name):
                raise _refused_error(tool, f"its parameter {format_value(name)} has > or a line break")
            argument = (f"<parameter={name}>\n", *_value_parts(name, parameters))
            parts += argument if name in required else [OneOf((argument, ()))]
        return *parts, self._end


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _property(parameters: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the schema of a parameter, after a reference if it is one."""
    schema = _object(_object(parameters.get("properties")).get(name))
    return _object(_referenced(schema, parameters)) or schema


def _referenced(schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> object:
    """Return the schema to which a `$ref` inside the parameters refers; None if there is none."""
    root, *names = str(schema.get("$ref")).split("/")
    value: object = parameters if root == "#" else None
    for name in names:
        value = _object(value).get(name)
    return value


def _types(schema: object, parameters: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names, with `other` for unknown ones; empty if it allows every value."""
    types, schemas = set[str](), [schema]
    for each in schemas:
        if len(schemas) > _MOST:
            return {"other"}
        each = _object(each)
        named = each.get("type")
        types |= {name for name in (named, *_list(named)) if isinstance(name, str)}
        types |= {"string" if isinstance(option, str) else "other" for option in _options(each)[:_MOST]}
        for key in _JOINING:
            schemas += _list(each.get(key))
        if "$ref" in each:
            schemas.append(_referenced(each, parameters) or {"type": "other"})
    return types


def _options(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def _value(text: str, types: set[str]) -> Any:
    """Parse the text of an argument as one of these JSON types; raises ValueError or RecursionError."""
    if types == {"string"} or (types == {"string", "null"} and text not in ("null", "None")):
        return text
    try:
        return DECODER.decode(json_literals(text))
    except (ValueError, RecursionError):
        if types and "string" not in types:
            raise
        return text


def _value_parts(name: str, parameters: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the grammar of an argument's value and of the tag that closes it."""
    schema, end = _property(parameters, name), "\n</parameter>\n"
    options, types = _options(schema), _types(schema, parameters)
    if options and types == {"string"}:
        return OneOf((str(option),) for option in options), end
    if not types or "string" in types:
        return (TextUntil(end),)
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return JsonOf({**schema, **definitions}), end


def _refused_error(tool: Tool, problem: str) -> DataError:
    return DataError(f"A call of {tool['name']} can't be required:", [problem], code="grammar-refused")
