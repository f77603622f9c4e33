"""Calls of tools: their formats in chat templates, and which texts are calls."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runner.serving.tool_calls import CallFormat, find_format

TEMPLATES = {
    "hermes": "{{ '<tool_call>\\n' }}{{ tool_call.arguments | tojson }}{{ '\\n</tool_call>' }}",
    "mistral": "{{ '[TOOL_CALLS] [' }}{{ tool_call.function | tojson }}{{ ']' + eos_token }}",
    "llama": "{{ '{\"name\": \"' + tool_call.name + '\", ' }}{{ '\"parameters\": ' }}",
}
ROME = ("weather", {"city": "Rome"})
TIME = ("time", {})
ONE = '{"name": "weather", "arguments": {"city": "Rome"}}'


def format_of(name: str) -> CallFormat:
    call_format = find_format(TEMPLATES[name])
    assert call_format is not None
    return call_format


def calls_in(name: str, text: str) -> list[tuple[str, Any]]:
    calls = format_of(name).calls(text, {"weather", "time"})
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [ROME]),
        ("hermes", f"<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>", "", [ROME, ROME]),
        ("hermes", f"I look.\n<tool_call>\n{ONE}", "I look.\n", [ROME]),
        ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", [TIME]),
        (
            "hermes",
            '<tool_call>{"name": "time", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            [("time", {"a": "</tool_call>"})],
        ),
        ("mistral", f"[TOOL_CALLS] [{ONE}, {ONE}]", "", [ROME, ROME]),
        ("mistral", f"[TOOL_CALLS]{ONE}", "", [ROME]),
        ("llama", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
        ("llama", '\n<|python_tag|>{"name": "time", "parameters": {}}', "", []),
        ("llama", '{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}', "", [TIME] * 2),
    ],
)
def test_calls_and_the_text_before_them(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    assert calls_in(name, text) == calls
    if calls:
        assert format_of(name).text_before(text) == content


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Hello"),
        ("hermes", ONE),
        ("hermes", "<tool_call>"),
        ("hermes", f"<tool_call>{ONE[:-1]}"),
        ("hermes", f"<tool_call>{ONE}</tool_call> Done."),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": ["time"], "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": "Rome"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>["time"]</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": ' + "[" * 100_000),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": ' + "9" * 10_000 + "}}"),
        ("mistral", f"[TOOL_CALLS] [{ONE}, "[:-3]),
        ("llama", '{"city": "Rome"}'),
        ("llama", 'Use {"name": "time", "parameters": {}}'),
    ],
)
def test_any_other_text_stays_text(name: str, text: str) -> None:
    assert calls_in(name, text) == []


@pytest.mark.parametrize("name", TEMPLATES)
@given(text=st.text(alphabet='<tool_ca>[TOOL_CALLS]{"x ', max_size=40))
def test_a_stream_never_sends_a_part_of_a_call(name: str, text: str) -> None:
    call_format = format_of(name)
    whole = call_format.text_before(text)
    parts = [call_format.text_before(text[:size]) for size in range(len(text) + 1)]
    assert all(len(part) <= len(following) for part, following in pairwise(parts))
    assert all(text.startswith(part) and (part == "" or whole.startswith(part)) for part in parts)


def test_a_template_of_another_format_has_none() -> None:
    assert find_format("") is None
    assert find_format("{{ message.content }}") is None
    assert find_format("<tool_call>\n<function={{ call.name }}>\n") is None
    assert find_format("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}") is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_required_call_is_one_of_its_format(name: str) -> None:
    call_format = format_of(name)
    tools = [
        {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
        {"name": "time"},
    ]
    written = [
        before + json.dumps({"city": "Rome"}) + after
        for before, schema, after in call_format.alternatives(tools)
    ]
    names = ["weather", "time"]
    for text, tool in zip(written, names, strict=True):
        assert calls_in(name, call_format.head + text) == [(tool, {"city": "Rome"})]
    assert [schema for _, schema, _ in call_format.alternatives(tools)] == [
        {"type": "object", "properties": {"city": {"type": "string"}}},
        {"type": "object"},
    ]
