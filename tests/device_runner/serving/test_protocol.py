"""Tests of OpenAI's protocol: how requests are parsed, and which errors name what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device_runner.serving.protocol import Reply, RequestError, format_usage, read_chat, read_completion
from prge.generation.sampling import SamplingSettings

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Once"}


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
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert (
        "tools is" in str(refused({**CHAT, "tools": tools}))
        and refused({**CHAT, "tools": tools}).status == 400
    )


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
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "one of system, developer"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role", "is ['user']"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "text"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]},
            "messages[0]",
            "tool_calls",
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
        ({"tools": [{"type": "function"}]}, "tools", "this server does not support that"),
        ({"logprobs": True}, "logprobs", "this server does not support that"),
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            "this server does not support that",
        ),
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
    "model messages prompt max_tokens temperature top_p n stop seed stream stream_options tools".split()
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
    whole = reply.whole([("a", "stop"), ("b", "length")], format_usage(3, 2, 1))
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["a", "b"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop", "length"]
    assert whole["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    events = [
        *reply.begin(0),
        reply.text_event(0, "a"),
        reply.end(0, "stop"),
        *reply.usage(format_usage(3, 2, 1)),
    ]
    assert all(event["object"] == "chat.completion.chunk" and event["id"] == whole["id"] for event in events)
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {}]
    assert [event["usage"] for event in events[:3]] == [None] * 3 and events[3]["choices"] == []
    plain = Reply(read_completion(json.dumps(COMPLETION).encode()))
    assert plain.whole([("a", "stop")], format_usage(3, 2, 1))["choices"][0]["text"] == "a"
    assert plain.text_event(0, "a")["choices"][0]["text"] == "a" and "usage" not in plain.text_event(0, "a")
    assert plain.begin(0) == plain.usage(format_usage(3, 2, 1)) == []
