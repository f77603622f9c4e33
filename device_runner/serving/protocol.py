"""OpenAI's protocol: parses request bodies, and builds response bodies.

Parameters that would change a response and are not supported are refused, not ignored: tools,
log-probabilities, penalties.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from prge.data.columns import RowError
from prge.data.forms.messages import template_kwargs
from prge.data.readers.feedback import TEMPLATE_KWARGS
from prge.data.tokenization.chat import Message
from prge.errors import ConfigError, format_value
from prge.formats.documents import DocumentError, parse_json
from prge.generation.sampling import SamplingSettings

Json = dict[str, Any]
Finish = Literal["stop", "length"]

MAX_CHOICES = 8
MAX_STOPS = 16
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Fields that change no response; and unsupported fields with the values that ask for the default behaviour.
_WITHOUT_EFFECT = frozenset("metadata prompt_cache_retention safety_identifier service_tier store".split())
# Strings by which clients keep requests from sharing cached prompts: vLLM's name, and OpenAI's.
_CACHE_KEYS = ("cache_salt", "prompt_cache_key", "user")
_DEFAULTS_ONLY: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
_CHOICE = tuple(item.name for item in fields(SamplingSettings))
_COMMON = ("model", "max_tokens", "n", "stop", "stream", "stream_options", *_CACHE_KEYS, *_CHOICE)
_TOKENS = ("max_completion_tokens", "max_tokens")


class RequestError(Exception):
    """A request that can't be answered: its HTTP status, and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        error_type: str = "invalid_request_error",
        retry_after: int = 1,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.retry_after = retry_after
        """Seconds after which a client that is refused with status 429 may try again."""
        self.body: Json = {"error": {"message": message, "type": error_type, "param": param, "code": code}}


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request; either `messages` or `prompts` is empty."""

    model: str
    messages: tuple[Message, ...]
    prompts: tuple[str | tuple[int, ...], ...]
    max_tokens: int | None
    """Most tokens of a completion; None: as many as the context has room for."""
    stop: tuple[str, ...]
    sampling: SamplingSettings
    count: int
    """Completions per prompt."""
    stream: bool
    usage: bool
    """Whether a stream ends with the token counts."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, besides the messages."""
    cache_key: tuple[str, ...] = ()
    """cache_salt, prompt_cache_key and user: only requests with equal ones share cached prompts. Empty if a
    request has none of them."""

    @property
    def is_chat(self) -> bool:
        """Whether the request has messages."""
        return bool(self.messages)


def read_chat(body: bytes) -> ParsedRequest:
    """Parse a request to /v1/chat/completions; raises RequestError."""
    content = _content(body, ("messages", "max_completion_tokens", TEMPLATE_KWARGS))
    messages = content.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _field_error("messages", messages, "a list of at least one message")
    parsed = tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages))
    try:
        variables = template_kwargs(content.get(TEMPLATE_KWARGS, {}))
    except RowError as error:
        raise RequestError(400, str(error), param=TEMPLATE_KWARGS) from None
    return replace(_parse_common(content, None, messages=parsed), variables=variables)


def read_completion(body: bytes) -> ParsedRequest:
    """Parse a request to /v1/completions; raises RequestError."""
    content = _content(body, ("prompt",))
    prompt = content.get("prompt")
    if isinstance(prompt, str) or _is_tokens(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _field_error("prompt", prompt, "a string, a list of tokens, or a list of these")
    for index, each in enumerate(prompt):
        if not isinstance(each, str) and not _is_tokens(each):
            raise _field_error(f"prompt[{index}]", each, "a string or a list of tokens")
    prompts = tuple(each if isinstance(each, str) else tuple(each) for each in prompt)
    # OpenAI's default for completions; chats have none.
    return _parse_common(content, 16, prompts=prompts)


@dataclass(frozen=True)
class FeedbackRequest:
    """Feedback on a completion.

    Attributes:
        id: the id of the response.
        index: the index of the completion in the response.
        rating: good or bad; None without one.
        correction: what the completion should have been; None without one.
    """

    id: str
    index: int
    rating: str | None
    correction: str | None


def read_feedback_request(body: bytes, max_characters: int) -> FeedbackRequest:
    """Parse a request to /v1/feedback; a longer correction than `max_characters` raises RequestError."""
    content = _object(body)
    for name in content:
        if name not in ("id", "index", "rating", "correction"):
            raise RequestError(
                400, f"unknown field {format_value(name)}", param=name, code="unknown_parameter"
            )
    for name in ("id", "rating", "correction"):
        if not isinstance(content.get(name, ""), str) or (name == "id" and not content.get(name)):
            needed = "the id of a response" if name == "id" else "a string"
            raise _field_error(name, content.get(name), needed)
    if len(content.get("correction", "")) > max_characters:
        problem = (
            f"correction has {len(content['correction'])} characters, at most {max_characters} are allowed"
        )
        raise RequestError(400, problem, param="correction")
    index = _whole(content, "index", 0) if "index" in content else 0
    return FeedbackRequest(content["id"], index, content.get("rating"), content.get("correction"))


def read_version(body: bytes) -> int:
    """Parse a POST to /v1/adapters/back, and return its version number.

    Raises:
        RequestError: the body has no such number.
    """
    content = _object(body)
    if unknown := content.keys() - {"version"}:
        raise RequestError(400, f"unknown field {format_value(min(unknown))}", code="unknown_parameter")
    version = content.get("version")
    if type(version) is not int:
        raise _field_error("version", version, "the number of the version that is served")
    return version


def _object(body: bytes) -> Json:
    """Return the fields of a body that are not null."""
    try:
        content = parse_json(body)
    except DocumentError as error:
        raise RequestError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(400, f"the body is {format_value(content)}, must be an object")
    return {name: value for name, value in content.items() if value is not None}


def _content(body: bytes, further: tuple[str, ...]) -> Json:
    content = _object(body)
    for name, value in content.items():
        if name in (*_COMMON, *further) or name in _WITHOUT_EFFECT:
            continue
        if name not in _DEFAULTS_ONLY:
            raise RequestError(
                400, f"unknown field {format_value(name)}", param=name, code="unknown_parameter"
            )
        if value not in _DEFAULTS_ONLY[name]:
            raise RequestError(
                400,
                f"{name} is {format_value(value)}: this server does not support that",
                param=name,
                code="unsupported_parameter",
            )
    return content


def _parse_common(
    content: Json,
    default: int | None,
    messages: tuple[Message, ...] = (),
    prompts: tuple[str | tuple[int, ...], ...] = (),
) -> ParsedRequest:
    model = content.get("model")
    if not isinstance(model, str):
        raise _field_error("model", model, "the name of a model")
    most = default
    for name in _TOKENS:
        if name in content:
            most = _whole(content, name, 1)
            break
    stop = content.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise _field_error("stop", content["stop"], "a string or a list of strings")
    if len(stop) > MAX_STOPS:
        raise RequestError(
            400, f"stop has {len(stop)} strings, at most {MAX_STOPS} are allowed", param="stop"
        )
    count = _whole(content, "n", 1) if "n" in content else 1
    if (answers := count * max(len(prompts), 1)) > MAX_CHOICES:
        raise RequestError(
            400, f"{answers} completions in one request, at most {MAX_CHOICES} are allowed", param="n"
        )
    options = content.get("stream_options", {})
    if not isinstance(options, dict):
        raise _field_error("stream_options", options, "an object")
    stream = _switch(content, "stream", "stream")
    usage = _switch(options, "include_usage", "stream_options.include_usage")
    for name in _CACHE_KEYS:
        if not isinstance(content.get(name, ""), str):
            raise _field_error(name, content[name], "a string")
    cache_key = tuple(content.get(name, "") for name in _CACHE_KEYS)
    return ParsedRequest(
        model,
        messages,
        prompts,
        most,
        tuple(stop),
        _choice(content),
        count,
        stream,
        stream and usage,
        cache_key=cache_key if any(cache_key) else (),
    )


def _choice(content: Json) -> SamplingSettings:
    values = {name: content[name] for name in _CHOICE if name in content}
    if type(values.get("seed")) is int:
        values["seed"] %= 1 << 64  # OpenAI accepts any integer as a seed
    try:
        return SamplingSettings(**{"temperature": 1.0, **values})
    except ConfigError as error:
        name = error.problems[0].split()[0].removeprefix("--").replace("-", "_")
        raise RequestError(400, "; ".join(error.problems).replace("--", ""), param=name) from None


def _message(where: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise _field_error(where, message, "an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise _field_error(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise RequestError(
                400,
                f"{where}.{name}: this server does not support that",
                param=where,
                code="unsupported_parameter",
            )
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _field_error(f"{where}.content", message.get("content"), "a string or parts of type text")
    return {"role": ROLES[role], "content": content}


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(type(each) is int and each >= 0 for each in value)


def _whole(content: Json, name: str, least: int) -> int:
    value = content[name]
    if type(value) is not int or value < least:
        raise _field_error(name, value, f"an integer of at least {least}")
    return value


def _switch(content: Json, name: str, where: str) -> bool:
    value = content.get(name)
    if value not in (None, True, False):
        raise _field_error(where, value, "true or false")
    return bool(value)


def _field_error(where: str, value: object, needed: str) -> RequestError:
    description = "is missing" if value is None else f"is {format_value(value)}"
    return RequestError(400, f"{where} {description}, must be {needed}", param=where)


class Reply:
    """Builds the bodies of the response to one request."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self._request = parsed
        prefix, object_type = (
            ("chatcmpl", "chat.completion") if parsed.is_chat else ("cmpl", "text_completion")
        )
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._head: Json = {
            "id": self.id,
            "object": object_type,
            "created": int(time.time()),
            "model": parsed.model,
        }

    def whole(self, answers: list[tuple[str, Finish]], usage: Json) -> Json:
        """Return the body of a response that is not streamed: texts with finish reasons, and token counts."""
        choices = []
        for index, (text, finish) in enumerate(answers):
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message} if self._request.is_chat else {"text": text}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": finish})
        return {**self._head, "choices": choices, "usage": usage}

    def begin(self, index: int) -> list[Json]:
        """Return the first events of a streamed completion."""
        return [self._chunk(index, {"role": "assistant", "content": ""})] if self._request.is_chat else []

    def text_event(self, index: int, text: str) -> Json:
        """Return the event for a chunk of a completion's text."""
        return self._chunk(index, {"content": text}, text)

    def end(self, index: int, finish: Finish) -> Json:
        """Return the last event of a completion."""
        return self._chunk(index, {}, finish=finish)

    def usage(self, usage: Json) -> list[Json]:
        """Return the last events of a stream: the token counts, if the request asked for them."""
        return [self._event([], usage)] if self._request.usage else []

    def _chunk(self, index: int, delta: Json, text: str = "", finish: Finish | None = None) -> Json:
        content: Json = {"delta": delta} if self._request.is_chat else {"text": text}
        return self._event([{"index": index, **content, "logprobs": None, "finish_reason": finish}])

    def _event(self, choices: list[Json], usage: Json | None = None) -> Json:
        event = {**self._head, "choices": choices}
        if self._request.is_chat:
            event["object"] = "chat.completion.chunk"
        return {**event, "usage": usage} if self._request.usage else event


def format_usage(prompt: int, completion: int, cached: int) -> Json:
    """Return the token counts in OpenAI's form; `cached`: prompt tokens that were not computed again."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
