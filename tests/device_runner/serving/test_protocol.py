"""Tests of OpenAI's protocol: how requests are parsed, and which errors name what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device_runner.serving.protocol import (
    Answer,
    Reply,
    RequestError,
    format_usage,
    read_chat,
    read_completion,
)
from device_runner.serving.tool_calls import ToolCall
from prge.generation.sampling import SamplingSettings

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Once"}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(name: str, arguments: object) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def json_schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def refused(content: object, read: Any = read_chat) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(content if isinstance(content, bytes) else json.dumps(content).encode())
    return caught.value


def test_defaults_are_openais_except_for_rare_tokens() -> None:
    chat = read_chat(json.dumps(CHAT).encode())
    assert chat.sampling.min_p == 0.1
    assert read_chat(json.dumps({**CHAT, "min_p": 0}).encode()).sampling.min_p == 0
    assert (chat.max_tokens, chat.stop, chat.count, chat.stream, chat.usage) == (None, (), 1, False, False)
    assert chat.sampling == SamplingSettings(temperature=1.0)
    assert read_completion(json.dumps(COMPLETION).encode()).max_tokens == 16


def test_a_chat_may_set_template_variables() -> None:
    given = {"enable_thinking": False}
    assert read_chat(json.dumps({**CHAT, "chat_template_kwargs": given}).encode()).variables == given
    for wrong in (3, ["a"], {"messages": []}):
        error = refused({**CHAT, "chat_template_kwargs": wrong})
        assert error.status == 400 and error.body["error"]["param"] == "chat_template_kwargs"
    assert "unknown field" in str(refused({**COMPLETION, "chat_template_kwargs": given}, read_completion))


def test_all_parameters_of_a_request() -> None:
    parsed = read_chat(
        json.dumps(
            {
                "model": "m",
                "messages": [
                    {"role": "developer", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
                    {"role": "assistant", "content": "c", "tool_calls": None},
                ],
                "max_tokens": 3, "max_completion_tokens": 5, "temperature": 0, "top_p": 0.5, "seed": -1,
                "n": 2, "stop": ["\n", "."], "stream": True, "stream_options": {"include_usage": True},
                "top_k": 7, "presence_penalty": 0.0, "frequency_penalty": None, "tools": [], "user": "me",
            }
        ).encode()
    )  # fmt: skip
    assert parsed.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
    )
    assert parsed.sampling == SamplingSettings(0, top_k=7, top_p=0.5, seed=(1 << 64) - 1)
    assert (parsed.max_tokens, parsed.count, parsed.stop, parsed.stream, parsed.usage) == (
        5,
        2,
        ("\n", "."),
        True,
        True,
    )


def test_tools_and_the_choice_among_them() -> None:
    def parsed(**more: Any) -> Any:
        return read_chat(json.dumps({**CHAT, "tools": [tool("a"), tool("b")], **more}).encode())

    auto = parsed()
    assert [each["name"] for each in auto.tools] == ["a", "b"] and auto.required == () and auto.is_parallel
    assert parsed(tool_choice="auto") == auto
    none = parsed(tool_choice="none")
    assert none.tools == none.required == () and not none.has_calls
    assert parsed(tool_choice="required").required == auto.tools
    assert [each["name"] for each in parsed(tool_choice=chosen("b")).required] == ["b"]
    assert not parsed(parallel_tool_calls=False).is_parallel


def test_calls_and_results_in_messages_are_those_of_chat_templates() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain", "extra": 1}
    messages = [CHAT["messages"][0], called("weather", '{"city": "Rome"}'), result, called("now", "")]
    chat = read_chat(json.dumps({**CHAT, "messages": messages}).encode())
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert chat.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert chat.messages[2] == {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain"}
    assert chat.messages[3]["tool_calls"][0]["function"]["arguments"] == {}
    assert chat.has_calls


def test_formats_of_a_completion() -> None:
    def schema(response_format: object) -> object:
        return read_chat(json.dumps({**CHAT, "response_format": response_format}).encode()).schema

    assert schema({"type": "text"}) is None
    assert schema({"type": "json_object"}) == {"type": "object"}
    assert schema(json_schema({"type": "array"})) == {"type": "array"}
    body = json.dumps({**COMPLETION, "grammar": "start: /a/"}).encode()
    assert read_completion(body).grammar == "start: /a/"
    error = refused({**COMPLETION, "response_format": {"type": "json_object"}}, read_completion)
    assert error.body["error"]["param"] == "response_format"


def test_log_probabilities() -> None:
    chat = read_chat(json.dumps({**CHAT, "logprobs": True, "top_logprobs": 3}).encode())
    assert chat.logprobs == 3
    assert read_chat(json.dumps({**CHAT, "logprobs": False, "top_logprobs": 0}).encode()).logprobs is None
    scored = {**COMPLETION, "echo": True, "max_tokens": 0, "logprobs": 1}
    parsed = read_completion(json.dumps(scored).encode())
    assert (parsed.echo, parsed.max_tokens, parsed.logprobs) == (True, 0, 1)
    for change, param in [
        ({"echo": False}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stream": True}, "echo"),
    ]:
        assert refused({**scored, **change}, read_completion).body["error"]["param"] == param


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_prompts(prompt: object, expected: tuple[object, ...]) -> None:
    assert read_completion(json.dumps({**COMPLETION, "prompt": prompt}).encode()).prompts == expected


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"model": 3}, "model", "model is 3, must be the name of a model"),
        ({"model": None}, "model", "model is missing"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": ["a"]}, "messages[0]", "must be an object with role and content"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role", "one of system, developer"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role", "is ['user']"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "text"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]},
            "messages[0].tool_calls[0]",
            "an object with a function",
        ),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages[0]", "tool_calls"),
        ({"messages": [called("weather", "{")]}, "messages[0].tool_calls[0].function.arguments", "object"),
        ({"messages": [called("weather", "[]")]}, "messages[0].tool_calls[0].function.arguments", "object"),
        ({"messages": [called("weather", None)]}, "messages[0].tool_calls[0]", "are strings"),
        (
            {"messages": [{"role": "tool", "content": "a", "tool_call_id": 3}]},
            "messages[0].tool_call_id",
            "a string",
        ),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, must be an integer of at least 1"),
        ({"max_tokens": True}, "max_tokens", "is True"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot', must be a number"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"top_p": 2}, "top_p", "at most 1"),
        ({"n": 9}, "n", "9 completions in one request, at most 8"),
        ({"stop": [3]}, "stop", "a string or a list of strings"),
        ({"stop": ""}, "stop", "stop is ''"),
        ({"stop": ["a"] * 17}, "stop", "17 strings"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": 1}, "stream_options", "an object"),
        ({"presence_penalty": 1}, "presence_penalty", "this server does not support that"),
        ({"tools": {}}, "tools", "tools is {}, must be a list of tools"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0] is"),
        ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools", 'of the type "function"'),
        ({"tools": [tool("two words")]}, "tools", "tools[0].function.name is 'two words'"),
        ({"tools": [tool("a", parameters="x")]}, "tools", "tools[0].function.parameters is 'x'"),
        ({"tools": [tool("a")] * 129}, "tools", "129 tools, at most 128"),
        ({"tools": [tool("a")], "tool_choice": "any"}, "tool_choice", "none, auto, required"),
        ({"tools": [tool("a")], "tool_choice": {"type": "function"}}, "tool_choice", "none, auto, required"),
        ({"tools": [tool("a")], "tool_choice": chosen("b")}, "tool_choice", "no such function"),
        ({"tool_choice": "required"}, "tool_choice", "no such function"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
        ({"logprobs": 2}, "logprobs", "true or false"),
        ({"top_logprobs": 2}, "top_logprobs", "requires logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "an integer from 0 to 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "an integer from 0 to 20"),
        ({"echo": True}, "echo", "this server does not support that"),
        ({"response_format": "json"}, "response_format", '"text", "json_object" or "json_schema"'),
        ({"response_format": {"type": "yaml"}}, "response_format", '"text", "json_object" or "json_schema"'),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be a JSON schema"),
        ({"response_format": json_schema("object")}, "response_format", "must be a JSON schema"),
        ({"grammar": 3}, "grammar", "a grammar in the syntax of Lark"),
        ({"grammar": "a", "response_format": {"type": "json_object"}}, "response_format", "at most one of"),
        ({"grammar": "a", "tools": [tool("a")]}, "grammar", "at most one of"),
        ({"tempature": 1}, "tempature", "unknown field 'tempature'"),
    ],
)
def test_errors_name_the_parameter(change: dict[str, Any], param: str, message: str) -> None:
    error = refused({**CHAT, **change})
    assert error.status == 400
    described = error.body["error"]
    assert described["type"] == "invalid_request_error" and described["param"] == param
    assert message in described["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"model": "\\ud800"}', b'{"n": NaN}', b"9" * 5000]
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    assert refused(body).status == refused(body, read_completion).status == 400


@pytest.mark.parametrize("prompt", [[], [[]], {"a": 1}, ["a", 3], [True], 3])
def test_malformed_prompts_are_refused(prompt: object) -> None:
    error = refused({**COMPLETION, "prompt": prompt}, read_completion)
    assert error.body["error"]["param"].startswith("prompt")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(
    "model messages prompt max_tokens temperature top_p n stop seed stream stream_options tools tool_choice "
    "response_format grammar logprobs top_logprobs echo".split()
)


@given(st.dictionaries(NAMES, JSON), st.sampled_from([CHAT, COMPLETION]))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_json_is_parsed_or_refused(changes: dict[str, Any], whole: dict[str, Any]) -> None:
    for read in (read_chat, read_completion):
        try:
            read(json.dumps({**whole, **changes}).encode())
        except RequestError as error:
            assert error.status == 400


def test_response_bodies() -> None:
    parsed = read_chat(
        json.dumps({**CHAT, "stream": True, "stream_options": {"include_usage": True}}).encode()
    )
    reply = Reply(parsed)
    calls = (ToolCall("weather", '{"city": "Rome"}', "c1"),)
    answers = [Answer("a", "stop"), Answer("b", "length"), Answer("", "tool_calls", calls)]
    whole = reply.whole(answers, format_usage(3, 2, 1))
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["a", "b", None]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop", "length", "tool_calls"]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assert whole["choices"][2]["message"]["tool_calls"] == [call]
    assert "tool_calls" not in whole["choices"][0]["message"]
    assert whole["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    events = [
        *reply.begin(0),
        reply.text_event(0, "a"),
        reply.calls_event(0, calls),
        reply.end(0, Answer("a", "tool_calls", calls)),
        *reply.usage(format_usage(3, 2, 1)),
    ]
    assert all(event["object"] == "chat.completion.chunk" and event["id"] == whole["id"] for event in events)
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"tool_calls": [{"index": 0, **call}]},
        {},
    ]
    assert [event["usage"] for event in events[:4]] == [None] * 4 and events[4]["choices"] == []
    plain = Reply(read_completion(json.dumps(COMPLETION).encode()))
    assert plain.whole([Answer("a", "stop")], format_usage(3, 2, 1))["choices"][0]["text"] == "a"
    assert plain.text_event(0, "a")["choices"][0]["text"] == "a" and "usage" not in plain.text_event(0, "a")
    assert plain.begin(0) == plain.usage(format_usage(3, 2, 1)) == []
