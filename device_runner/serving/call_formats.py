"""The formats in which chat templates write calls of tools.

    <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>    Hermes, Qwen 3, SmolLM3
    <tool_call>                                                                  Qwen3-Coder, Qwen3.5
    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>
    [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]            Mistral
    [TOOL_CALLS]weather[ARGS]{"city": "Rome"}                                    newer Mistrals
    {"name": "weather", "parameters": {"city": "Rome"}}                          Llama 3
    <|tool_call_start|>[weather(city="Rome")]<|tool_call_end|>                   LFM2

xml_calls.py reads the tags of Qwen3-Coder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from device_runner.serving.tool_calls import DECODER, Call, CallFormat, Tool, json_literals, match
from device_runner.serving.xml_calls import XmlCalls
from device_runner.session.grammars import ControlToken, JsonOf, Part

# Templates with these texts write calls in other formats: of GLM, and of Functionary.
_OTHER_SIGNS = ("<arg_key>", "<function=")


class _JsonCalls(CallFormat):
    """JSON objects with the name and the arguments; `arguments` is the key of the arguments."""

    arguments: ClassVar[str] = "arguments"

    def _read(self, text: str, at: int, tools: Mapping[str, Tool]) -> Call:
        value, end = DECODER.raw_decode(text, at)
        return value["name"], value.get(self.arguments, {}), end

    def _call_of(self, tool: Tool) -> tuple[Part, ...]:
        before = f'{{"name": {json.dumps(tool["name"])}, "{self.arguments}": '
        return before, JsonOf({"type": "object", **tool.get("parameters", {})}), "}"


class _Hermes(_JsonCalls):
    signs = ("<tool_call>",)
    begin = "<tool_call>"
    head = "<tool_call>\n"
    marks = ("<tool_call>", "</tool_call>")


class _Mistral(_JsonCalls):
    signs = ("[TOOL_CALLS]",)
    begin = "[TOOL_CALLS]"
    head = "[TOOL_CALLS] ["
    marks = ("[TOOL_CALLS]", "[", "]", ",")


class _Llama(_JsonCalls):
    signs = ('"parameters": ',)
    begin = head = ""
    marks = ("<|python_tag|>", ";")
    arguments = "parameters"


class _NewMistral(CallFormat):
    """Names and arguments after control tokens; some templates write an identifier in between."""

    signs = ("[TOOL_CALLS]", "[ARGS]")
    begin = head = "[TOOL_CALLS]"
    marks = ("[TOOL_CALLS]",)
    control = ("[CALL_ID]", "[ARGS]")
    _before_arguments: ClassVar = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*")

    def _read(self, text: str, at: int, tools: Mapping[str, Tool]) -> Call:
        before = match(self._before_arguments, text, at)
        return before[1], *DECODER.raw_decode(text, before.end())

    def _call_of(self, tool: Tool) -> tuple[Part, ...]:
        parameters = JsonOf({"type": "object", **tool.get("parameters", {})})
        return tool["name"], ControlToken("[ARGS]"), parameters


class _Lfm2(_JsonCalls):
    """Calls in the syntax of Python with literals as arguments, or JSON, which a required call has."""

    signs = ("<|tool_call_start|>",)
    begin = "<|tool_call_start|>"
    head = "<|tool_call_start|>["
    marks = ("<|tool_call_start|>", "<|tool_call_end|>", "[", "]", ",")
    end = "<|tool_call_end|>"
    _name: ClassVar = re.compile(r"([\w.-]+)\(\s*")
    _argument: ClassVar = re.compile(r"(\w+)\s*=\s*")
    _comma: ClassVar = re.compile(r"\s*(?:,\s*|(?=\)))")

    def _divided(self, text: str) -> tuple[str, str, str]:
        before, calls, after = super()._divided(text)
        return before, json_literals(calls), after

    def _read(self, text: str, at: int, tools: Mapping[str, Tool]) -> Call:
        if text[at] == "{":
            return super()._read(text, at, tools)
        name, arguments = match(self._name, text, at), dict[str, Any]()
        at = name.end()
        while not text.startswith(")", at):
            argument = match(self._argument, text, at)
            arguments[argument[1]], at = DECODER.raw_decode(text, argument.end())
            at = match(self._comma, text, at).end()
        return name[1], arguments, at + 1


_FORMATS: tuple[CallFormat, ...] = (_Lfm2(), _NewMistral(), _Mistral(), XmlCalls(), _Hermes(), _Llama())


def find_format(template: str) -> CallFormat | None:
    """Return the format in which a chat template writes calls; None if it is unknown."""
    call_format = next((each for each in _FORMATS if all(sign in template for sign in each.signs)), None)
    is_other = any(sign in template for sign in _OTHER_SIGNS) and not isinstance(call_format, XmlCalls)
    return None if is_other else call_format
