"""Calls of tools: their formats in chat templates, and which texts are calls."""

from __future__ import annotations

import contextlib
import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runner.serving.call_formats import find_format
from device_runner.serving.tool_calls import CallFormat
from device_runner.session.grammars import Grammars
from prge.errors import DataError
from tests.constrained import TOKENIZER, completions

TEMPLATES = {
    "hermes": "{{ '<tool_call>\\n' }}{{ tool_call.arguments | tojson }}{{ '\\n</tool_call>' }}",
    "mistral": "{{ '[TOOL_CALLS] [' }}{{ tool_call.function | tojson }}{{ ']' + eos_token }}",
    "new mistral": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "qwen-coder": "{{ '<tool_call>\\n<function=' + name + '>\\n' }}{{ '<parameter=' + key + '>\\n' }}",
    "lfm2": "{{ '<|tool_call_start|>[' + (calls | join(', ')) + ']<|tool_call_end|>' }}",
    "llama": "{{ '{\"name\": \"' + tool_call.name + '\", ' }}{{ '\"parameters\": ' }}",
}
ROME = ("weather", {"city": "Rome"})
TIME = ("time", {})
ONE = '{"name": "weather", "arguments": {"city": "Rome"}}'


TOOLS: list[Any] = [
    {
        "name": "weather",
        "parameters": {
            "properties": {
                "city": {"type": "string", "enum": ["Rome", "Paris"]},
                "days": {"enum": [1, 2]},
                "now": {"type": "boolean"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
    {"name": "time", "parameters": {"additionalProperties": False}},
]
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
WEATHER = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"


def format_of(name: str) -> CallFormat:
    call_format = find_format(TEMPLATES[name])
    assert call_format is not None
    return call_format


def calls_in(name: str, text: str) -> list[tuple[str, Any]]:
    calls = format_of(name).calls(text, TOOLS)
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
        ("new mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "", [ROME]),
        ("new mistral", 'I look.[TOOL_CALLS]weather[CALL_ID]a1[ARGS] {"city": "Rome"}', "I look.", [ROME]),
        ("new mistral", "[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]time[ARGS]{}", "", [TIME] * 2),
        ("qwen-coder", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [ROME]),
        ("qwen-coder", f"I look.\n\n<tool_call>\n{WEATHER}", "I look.\n\n", [ROME]),
        (
            "qwen-coder",
            f"<tool_call>{WEATHER}</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
            "",
            [ROME, TIME],
        ),
        ("lfm2", f"{LFM2[0]}[weather(city='Rome')]{LFM2[1]}", "", [ROME]),
        ("lfm2", f'It\'s here: {LFM2[0]}[time(), weather(city="Rome",)]', "It's here: ", [TIME, ROME]),
        ("lfm2", f"{LFM2[0]}[time()]{LFM2[1]}{LFM2[0]}[time( )]{LFM2[1]}", "", [TIME] * 2),
        ("lfm2", f"{LFM2[0]}[{ONE}]{LFM2[1]}", "", [ROME]),
        (
            "lfm2",
            LFM2[0] + r"""[weather(city='it\'s "Rome"\n', days=[1, -2.5, {'a': None}], now = True)]""",
            "",
            [("weather", {"city": 'it\'s "Rome"\n', "days": [1, -2.5, {"a": None}], "now": True})],
        ),
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
        ("new mistral", "[TOOL_CALLS]weather{}"),
        ("new mistral", "[TOOL_CALLS]other[ARGS]{}"),
        ("new mistral", "[TOOL_CALLS]time[ARGS][]"),
        ("qwen-coder", f"<tool_call>\n{WEATHER[:-3]}"),
        ("qwen-coder", f"<tool_call>\n{WEATHER}\n</tool_call> Done."),
        ("qwen-coder", f"<tool_call>\n{WEATHER.replace('weather', 'other')}\n</tool_call>"),
        ("qwen-coder", f"<tool_call>\n{WEATHER.replace('</parameter>', '')}\n</tool_call>"),
        ("qwen-coder", f"<tool_call>\n{ONE}\n</tool_call>"),
        ("lfm2", f"{LFM2[0]}[weather('Rome')]"),
        ("lfm2", f"{LFM2[0]}[weather(city=Rome)]"),
        ("lfm2", f"{LFM2[0]}[weather(city=open('x'))]"),
        ("lfm2", f"{LFM2[0]}[weather(city='Rome' days=1)]"),
        ("lfm2", f"{LFM2[0]}[weather(city='Rome']{LFM2[1]}"),
        ("lfm2", f"{LFM2[0]}[time()]{LFM2[1]} and {LFM2[0]}[time()]{LFM2[1]}"),
        ("llama", '{"city": "Rome"}'),
        ("llama", 'Use {"name": "time", "parameters": {}}'),
    ],
)
def test_any_other_text_stays_text(name: str, text: str) -> None:
    assert calls_in(name, text) == []


def test_text_after_the_calls_of_lfm2_is_a_part_of_the_text() -> None:
    text = f"I look.{LFM2[0]}[time()]{LFM2[1]} It's late."
    assert calls_in("lfm2", text) == [TIME]
    assert format_of("lfm2").text_around(text) == "I look. It's late."


@pytest.mark.parametrize("name", TEMPLATES)
@given(text=st.text(alphabet='<|tool_cart>[TOOL_CALLS]{"x ', max_size=40))
def test_a_stream_never_sends_a_part_of_a_call(name: str, text: str) -> None:
    call_format = format_of(name)
    whole = call_format.text_before(text)
    parts = [call_format.text_before(text[:size]) for size in range(len(text) + 1)]
    assert all(len(part) <= len(following) for part, following in pairwise(parts))
    assert all(text.startswith(part) and (part == "" or whole.startswith(part)) for part in parts)


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ message.content }}",
        "<tool_call>{{ name }}<arg_key>{{ key }}</arg_key>",
        "<tool_call>\n<function={{ call.name }}>{{ arguments }}</function>",
        "<seed:tool_call>\n<function={{ call.name }}>\n<parameter={{ key }}>",
    ],
)
def test_a_template_of_another_format_has_none(template: str) -> None:
    assert find_format(template) is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_required_call_is_one_of_its_format(name: str) -> None:
    pytest.importorskip("llguidance", reason="the package llguidance is not installed")
    call_format = format_of(name)
    for choice in (TOOLS, TOOLS[1:]):
        constraint = Grammars(TOKENIZER).sequence(call_format.call_of(choice))
        for answer in completions(constraint, count=6):
            assert answer.reason == "stop"
            ((tool, arguments),) = calls_in(name, call_format.head + answer.text)
            if tool == "weather":
                assert arguments["city"] in ("Rome", "Paris") and arguments["days"] in (1, 2)
                assert arguments.keys() <= {"city", "days", "now"}
                assert isinstance(arguments.get("now", True), bool)
            else:
                assert tool == "time" and arguments == {}


def xml(*arguments: tuple[str, str], name: str = "typed") -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "two\n\n lines <b> </function>\n", "two\n\n lines <b> </function>\n"),
        ({"type": "string"}, "", ""),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12 of 13", "12 of 13"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"$ref": "#/$defs/code"}, "007", "007"),
        ({"allOf": [{"$ref": "#/$defs/code"}]}, "007", "007"),
        ({"type": "integer"}, "-3", -3),
        ({"type": "number"}, "1e3", 1000.0),
        # Templates write values as Python does.
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "['it\\'s', None, \"a\"]", ["it's", None, "a"]),
        ({"type": "object"}, '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ({}, "[1]", [1]),
        ({}, "no JSON", "no JSON"),
        (True, "Rome", "Rome"),
    ],
)
def test_tags_have_values_of_the_types_in_the_schema(schema: object, text: str, value: object) -> None:
    parameters = {"properties": {"value": schema}, "$defs": {"code": {"type": "string"}}}
    tools = [{"name": "typed", "parameters": parameters}]
    (call,) = format_of("qwen-coder").calls(xml(("value", text)), tools)
    assert json.loads(call.arguments) == {"value": value}


@pytest.mark.parametrize(
    ("schema", "text"),
    [({"type": "integer"}, "three"), ({"type": "object"}, '{"a": '), ({"$ref": "#/a"}, "text")],
)
def test_a_value_of_another_type_is_no_call(schema: object, text: str) -> None:
    tools = [{"name": "typed", "parameters": {"properties": {"value": schema}}}]
    assert format_of("qwen-coder").calls(xml(("value", text)), tools) == []


CYCLE = {"anyOf": [{"$ref": "#/$defs/cycle"}] * 50}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": [], "required": 3},
        {"properties": {"a": 1, "b": {"type": 3, "enum": 4, "anyOf": 5}}},
        {"properties": {"a": {"$ref": "#/$defs/cycle"}}, "$defs": {"cycle": CYCLE}},
        {"properties": {"a": {"$ref": "https://example.com/schema"}}},
        {"properties": {"a": {"$ref": "#/properties/a"}, "b": {"$ref": 3}}},
        {"properties": {"a>b": {}, "a\nb": {}}},
        {"anyOf": [{"properties": {"a": {"type": "string"}}}]},
        {"$defs": {"a": {"enum": ["x" * 9] * 3000}}}
        | {"properties": {f"p{number}": {"$ref": "#/$defs/a"} for number in range(3000)}},
        {"$defs": {"a": {"enum": [1] * 9000}}}
        | {"properties": {f"p{number}": {"$ref": "#/$defs/a"} for number in range(3000)}},
    ],
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_parameters_of_any_form_are_refused_or_used_in_bounded_time(name: str, parameters: Any) -> None:
    pytest.importorskip("llguidance", reason="the package llguidance is not installed")
    tools = [{"name": "typed", "parameters": parameters}]
    start = time.process_time()
    with contextlib.suppress(DataError):
        Grammars(TOKENIZER).sequence(format_of(name).call_of(tools))
    format_of("qwen-coder").calls(xml(("a", "Rome"), ("b", "3"), ("p7", "x")), tools)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "text",
    [
        "<parameter=a>\n" * 30_000,
        "<function=weather>" * 30_000,
        "\\'" * 100_000,
        "weather('\\'" * 50_000,
        "weather(city=" * 30_000,
        "[" * 200_000,
        '{"name": ' * 30_000,
        "weather[CALL_ID]" * 30_000,
        " " * 200_000 + "x",
        "-" * 200_000,
    ],
)
def test_long_texts_take_time_that_grows_with_their_length(name: str, text: str) -> None:
    call_format = format_of(name)
    start = time.process_time()
    assert calls_in(name, call_format.head + text) == []
    assert calls_in(name, call_format.head + xml(("city", text))[len("<tool_call>") :]) == []
    call_format.text_around(text)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", TEMPLATES)
@given(st.data())
def test_no_text_is_an_error(name: str, data: st.DataObject) -> None:
    call_format = format_of(name)
    texts = [
        *call_format.marks,
        *call_format.signs,
        call_format.end,
        "weather",
        "(",
        ")",
        "=",
        '"',
        "'",
        "\\",
    ]
    texts += [", ", "city", "True", "1e999", "NaN", ONE, "</parameter>", "é"]
    text = "".join(data.draw(st.lists(st.sampled_from(texts), max_size=20)))
    for call in call_format.calls(call_format.head + text, TOOLS):
        assert isinstance(json.loads(call.arguments), dict)
    assert len(call_format.text_around(text)) <= len(text)
