"""Calls of tools in the text of a completion, in the formats in which chat templates write them.

    <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>    Hermes, Qwen, SmolLM3
    [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]            Mistral
    {"name": "weather", "parameters": {"city": "Rome"}}                          Llama 3

Everything else stays text: calls of other tools, incomplete JSON, text after a call.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from prge.generation.text_stream import overlap

# Mistral's templates require identifiers of nine letters and digits.
_ID_LENGTH = 9


def _call_id() -> str:
    return uuid.uuid4().hex[:_ID_LENGTH]


@dataclass(frozen=True)
class ToolCall:
    """A call that a model has written; `arguments` is the JSON of an object."""

    name: str
    arguments: str
    id: str = field(default_factory=_call_id)


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls: JSON objects with the name and the arguments, between marks.

    Attributes:
        sign: text of a chat template that shows that it writes this format.
        begin: text that begins a call of a completion; empty: a completion that begins with `{` is a call.
        head: text before a call, which a completion that must be a call continues.
        marks: texts around and between calls.
        arguments: key of the arguments.
    """

    sign: str
    begin: str
    head: str
    marks: tuple[str, ...]
    arguments: str

    def text_before(self, text: str) -> str:
        """Return the beginning of an unfinished completion that surely isn't part of a call."""
        if not self.begin:
            return "" if text.lstrip()[:1] in ("", "{") else text
        start = text.find(self.begin)
        return text[:start] if start >= 0 else text[: len(text) - overlap(text, self.begin)]

    def calls(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """Return the calls after `text_before` of a whole completion.

        Returns:
            An empty list if the text has none, or is anything else than calls of these tools: JSON that is
            incomplete, an unknown name, arguments that aren't an object, or text after a call.
        """
        rest, calls = text[len(self.text_before(text)) :], list[ToolCall]()
        marks = re.compile(rf"(?:\s|{'|'.join(map(re.escape, self.marks))})*")
        try:
            at = _end(marks, rest, 0)
            while at < len(rest):
                value, at = _DECODER.raw_decode(rest, at)
                arguments = value.get(self.arguments, {})
                if value["name"] not in names or not isinstance(arguments, dict):
                    return []
                calls.append(ToolCall(value["name"], json.dumps(arguments, allow_nan=False)))
                at = _end(marks, rest, at)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []
        return calls

    def alternatives(self, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, object, str]]:
        """Return a call of each tool, as `Grammars.json` takes it."""
        calls: list[tuple[str, object, str]] = []
        for tool in tools:
            before = f'{{"name": {json.dumps(tool["name"])}, "{self.arguments}": '
            calls.append((before, {"type": "object", **tool.get("parameters", {})}, "}"))
        return calls


_HERMES = CallFormat(
    "<tool_call>", "<tool_call>", "<tool_call>\n", ("<tool_call>", "</tool_call>"), "arguments"
)
_MISTRAL = CallFormat(
    "[TOOL_CALLS]", "[TOOL_CALLS]", "[TOOL_CALLS] [", ("[TOOL_CALLS]", "[", "]", ","), "arguments"
)
_LLAMA = CallFormat('"parameters": ', "", "", ("<|python_tag|>", ";"), "parameters")
# Signs of formats that aren't JSON objects with name and arguments: those of Qwen3-Coder, of newer Mistrals
# and of LFM2.
_OTHER_SIGNS = ("<function=", "[ARGS]", "<|tool_call_start|>")


def find_format(template: str) -> CallFormat | None:
    """Return the format in which a chat template writes calls; None if it is unknown."""
    if any(sign in template for sign in _OTHER_SIGNS):
        return None
    return next((each for each in (_MISTRAL, _HERMES, _LLAMA) if each.sign in template), None)


def _end(marks: re.Pattern[str], text: str, start: int) -> int:
    match = marks.match(text, start)
    assert match is not None
    return match.end()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
