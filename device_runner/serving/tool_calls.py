"""Calls of tools in the text of a completion: what the formats of chat templates have in common.

A completion has a text, then calls between marks. Everything else stays text: calls of other tools,
incomplete calls, and, in most formats, calls with text after them.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from device_runner.session.grammars import OneOf, Part
from prge.generation.text_stream import overlap

# Mistral's templates require identifiers of nine letters and digits.
_ID_LENGTH = 9

Tool = Mapping[str, Any]
"""A function as a request describes it, with its name, and the JSON schema of its parameters."""
Call = tuple[str, Any, int]
"""The name and the arguments of a call in a text, and the position after it."""


def _call_id() -> str:
    return uuid.uuid4().hex[:_ID_LENGTH]


@dataclass(frozen=True)
class ToolCall:
    """A call that a model has written; `arguments` is the JSON of an object."""

    name: str
    arguments: str
    id: str = field(default_factory=_call_id)


class CallFormat(ABC):
    """How a model writes calls.

    Attributes:
        signs: texts of a chat template that writes this format.
        begin: text that begins the calls of a completion; empty: a completion that begins with `{` is a call.
        head: text before a call, which a completion that must be a call continues.
        marks: texts around and between calls.
        end: text that ends the calls, after which other text may follow; empty: none may follow.
        control: other texts inside calls that may be control tokens of the model.
    """

    signs: ClassVar[tuple[str, ...]]
    begin: ClassVar[str]
    head: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    end: ClassVar[str] = ""
    control: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def _read(self, text: str, at: int, tools: Mapping[str, Tool]) -> Call:
        """Read the call that begins at a position of a text.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, RecursionError: there is no call.
        """

    @abstractmethod
    def _call_of(self, tool: Tool) -> tuple[Part, ...]:
        """Return what may follow `head` in a call of a tool."""

    def call_of(self, tools: Sequence[Tool]) -> list[Part]:
        """Return what a completion that must be a call of one of these tools may contain after `head`."""
        return [OneOf(map(self._call_of, tools))]

    def text_before(self, text: str) -> str:
        """Return the beginning of an unfinished completion that surely isn't part of a call."""
        if not self.begin:
            return "" if text.lstrip()[:1] in ("", "{") else text
        start = text.find(self.begin)
        return text[:start] if start >= 0 else text[: len(text) - overlap(text, self.begin)]

    def text_around(self, text: str) -> str:
        """Return the text of a whole completion with calls, without the calls."""
        before, _, after = self._divided(text)
        return before + after

    def calls(self, text: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """Parse the calls of a whole completion.

        Returns:
            An empty list if the text has none, or anything else than calls of these tools where it has calls:
            an incomplete call, an unknown name, or arguments that aren't an object.
        """
        named, calls = {tool["name"]: tool for tool in tools}, list[ToolCall]()
        _, text, _ = self._divided(text)
        marks = re.compile(rf"(?:\s|{'|'.join(map(re.escape, self.marks))})*")
        try:
            at = match(marks, text, 0).end()
            while at < len(text):
                name, arguments, at = self._read(text, at, named)
                if name not in named or not isinstance(arguments, dict):
                    return []
                calls.append(ToolCall(name, json.dumps(arguments, allow_nan=False)))
                at = match(marks, text, at).end()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []
        return calls

    def _divided(self, text: str) -> tuple[str, str, str]:
        """Split a whole completion into the text before its calls, the calls, and the text after them."""
        start = len(self.text_before(text))
        end = text.rfind(self.end, start) if self.end else -1
        end = len(text) if end < 0 else end + len(self.end)
        return text[:start], text[start:end], text[end:]


def match(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    """Match a pattern at a position of a text; raises ValueError."""
    result = pattern.match(text, at)
    if result is None:
        raise ValueError(f"no {pattern.pattern} at {at}")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Models write line breaks in strings.
DECODER = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)

# A string, an escape outside of strings, or a word.
_LITERAL = re.compile(r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*"|\\.|\w+""", re.DOTALL)
_ESCAPE = re.compile(r'\\.|"', re.DOTALL)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def json_literals(text: str) -> str:
    """Replace the literals of Python in a text by those of JSON."""
    return _LITERAL.sub(_json_literal, text)


def _json_literal(literal: re.Match[str]) -> str:
    text = literal[0]
    if text[0] not in "'\"":
        return _CONSTANTS.get(text, text)
    escapes = {"\\'": "'", '"': '\\"'}
    return f'"{_ESCAPE.sub(lambda escape: escapes.get(escape[0], escape[0]), text[1:-1])}"'
