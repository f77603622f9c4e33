"""OpenAI's protocol: bodies of requests to what is asked for, texts to the bodies of answers.

What would change an answer and isn't known here is refused, not ignored: tools, log-probabilities, penalties.
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
from prge.errors import ConfigError, shown
from prge.formats.documents import DocumentError, parse_json
from prge.generation.sampling import SamplingSettings

Json = dict[str, Any]
Finish = Literal["stop", "length"]

MOST_CHOICES = 8
MOST_STOPS = 16
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Fields that change no answer, and the values of others that ask for what is done anyway.
_WITHOUT_EFFECT = frozenset("metadata prompt_cache_retention safety_identifier service_tier store".split())
# Texts by which clients keep requests from sharing what is computed of prompts: vLLM's name, and OpenAI's.
_CACHE_KEYS = ("cache_salt", "prompt_cache_key", "user")
_AS_IT_IS: Mapping[str, tuple[Any, ...]] = {
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
    """A request that can't be answered: its HTTP status, and what OpenAI's clients are told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after: int = 1,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.retry_after = retry_after
        """Seconds after which a client that is refused with status 429 may try again."""
        self.body: Json = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Asked:
    """A request as it was understood; of `messages` and `prompts` one is empty."""

    model: str
    messages: tuple[Message, ...]
    prompts: tuple[str | tuple[int, ...], ...]
    most: int | None
    """Most tokens of an answer; None: as many as there is room for."""
    stop: tuple[str, ...]
    sampling: SamplingSettings
    count: int
    """Answers to each prompt."""
    stream: bool
    usage: bool
    """Whether a stream ends with the numbers of tokens."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is given beside the messages."""
    cache_key: tuple[str, ...] = ()
    """cache_salt, prompt_cache_key and user: only requests with equal ones share cached prompts. Empty if a
    request has none of them."""

    @property
    def is_chat(self) -> bool:
        """Whether messages are answered."""
        return bool(self.messages)


def read_chat(body: bytes) -> Asked:
    """A request to /v1/chat/completions; raises RequestError."""
    content = _content(body, ("messages", "max_completion_tokens", TEMPLATE_KWARGS))
    messages = content.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of at least one message")
    read = tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages))
    try:
        variables = template_kwargs(content.get(TEMPLATE_KWARGS, {}))
    except RowError as error:
        raise RequestError(400, str(error), param=TEMPLATE_KWARGS) from None
    return replace(_asked(content, None, messages=read), variables=variables)


def read_completion(body: bytes) -> Asked:
    """A request to /v1/completions; raises RequestError."""
    content = _content(body, ("prompt",))
    prompt = content.get("prompt")
    if isinstance(prompt, str) or _is_tokens(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _wrong("prompt", prompt, "a text, a list of tokens, or a list of these")
    for index, each in enumerate(prompt):
        if not isinstance(each, str) and not _is_tokens(each):
            raise _wrong(f"prompt[{index}]", each, "a text or a list of tokens")
    prompts = tuple(each if isinstance(each, str) else tuple(each) for each in prompt)
    # OpenAI's default here, where chats have none.
    return _asked(content, 16, prompts=prompts)


@dataclass(frozen=True)
class Judgement:
    """What a client says of an answer by its `id`, and where it was one of several its `index`."""

    id: str
    index: int
    rating: str | None
    correction: str | None


def read_judgement(body: bytes, most: int) -> Judgement:
    """A request to /v1/feedback, whose correction has at most so many characters; raises RequestError."""
    content = _object(body)
    for name in content:
        if name not in ("id", "index", "rating", "correction"):
            raise RequestError(400, f"unknown field {shown(name)}", param=name, code="unknown_parameter")
    for name in ("id", "rating", "correction"):
        if not isinstance(content.get(name, ""), str) or (name == "id" and not content.get(name)):
            raise _wrong(name, content.get(name), "the id of an answer" if name == "id" else "a text")
    if len(content.get("correction", "")) > most:
        problem = f"correction has {len(content['correction'])} characters, at most {most} are taken"
        raise RequestError(400, problem, param="correction")
    index = _whole(content, "index", 0) if "index" in content else 0
    return Judgement(content["id"], index, content.get("rating"), content.get("correction"))


def read_version(body: bytes) -> int:
    """The version number in the body of a POST to /v1/adapters/back.

    Raises:
        RequestError: the body has no such number.
    """
    content = _object(body)
    if unknown := content.keys() - {"version"}:
        raise RequestError(400, f"unknown field {shown(min(unknown))}", code="unknown_parameter")
    version = content.get("version")
    if type(version) is not int:
        raise _wrong("version", version, "the number of the version that is served")
    return version


def _object(body: bytes) -> Json:
    """The fields of a body that aren't null."""
    try:
        content = parse_json(body)
    except DocumentError as error:
        raise RequestError(400, f"the body can't be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(400, f"the body is {shown(content)}, must be an object")
    return {name: value for name, value in content.items() if value is not None}


def _content(body: bytes, further: tuple[str, ...]) -> Json:
    content = _object(body)
    for name, value in content.items():
        if name in (*_COMMON, *further) or name in _WITHOUT_EFFECT:
            continue
        if name not in _AS_IT_IS:
            raise RequestError(400, f"unknown field {shown(name)}", param=name, code="unknown_parameter")
        if value not in _AS_IT_IS[name]:
            raise RequestError(
                400,
                f"{name} is {shown(value)}: this server doesn't do that",
                param=name,
                code="unsupported_parameter",
            )
    return content


def _asked(
    content: Json,
    default: int | None,
    messages: tuple[Message, ...] = (),
    prompts: tuple[str | tuple[int, ...], ...] = (),
) -> Asked:
    model = content.get("model")
    if not isinstance(model, str):
        raise _wrong("model", model, "the name of a model")
    most = default
    for name in _TOKENS:
        if name in content:
            most = _whole(content, name, 1)
            break
    stop = content.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise _wrong("stop", content["stop"], "a text or a list of texts")
    if len(stop) > MOST_STOPS:
        raise RequestError(400, f"stop has {len(stop)} texts, at most {MOST_STOPS} are taken", param="stop")
    count = _whole(content, "n", 1) if "n" in content else 1
    if (answers := count * max(len(prompts), 1)) > MOST_CHOICES:
        raise RequestError(
            400, f"{answers} answers in one request, at most {MOST_CHOICES} are given", param="n"
        )
    options = content.get("stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", options, "an object")
    stream = _switch(content, "stream", "stream")
    usage = _switch(options, "include_usage", "stream_options.include_usage")
    for name in _CACHE_KEYS:
        if not isinstance(content.get(name, ""), str):
            raise _wrong(name, content[name], "a text")
    cache_key = tuple(content.get(name, "") for name in _CACHE_KEYS)
    return Asked(
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
    given = {name: content[name] for name in _CHOICE if name in content}
    if type(given.get("seed")) is int:
        given["seed"] %= 1 << 64  # any whole number is a seed there
    try:
        return SamplingSettings(**{"temperature": 1.0, **given})
    except ConfigError as error:
        name = error.problems[0].split()[0].removeprefix("--").replace("-", "_")
        raise RequestError(400, "; ".join(error.problems).replace("--", ""), param=name) from None


def _message(where: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise _wrong(where, message, "an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise RequestError(
                400, f"{where}.{name}: this server doesn't do that", param=where, code="unsupported_parameter"
            )
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _wrong(f"{where}.content", message.get("content"), "a text or parts of type text")
    return {"role": ROLES[role], "content": content}


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(type(each) is int and each >= 0 for each in value)


def _whole(content: Json, name: str, least: int) -> int:
    value = content[name]
    if type(value) is not int or value < least:
        raise _wrong(name, value, f"a whole number of at least {least}")
    return value


def _switch(content: Json, name: str, where: str) -> bool:
    value = content.get(name)
    if value not in (None, True, False):
        raise _wrong(where, value, "true or false")
    return bool(value)


def _wrong(where: str, value: object, needed: str) -> RequestError:
    seen = "is missing" if value is None else f"is {shown(value)}"
    return RequestError(400, f"{where} {seen}, must be {needed}", param=where)


class Reply:
    """Writes the bodies of the answer to one request."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        prefix, kind = ("chatcmpl", "chat.completion") if asked.is_chat else ("cmpl", "text_completion")
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._head: Json = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": asked.model,
        }

    def whole(self, answers: list[tuple[str, Finish]], usage: Json) -> Json:
        """The body of an answer that isn't streamed: texts in order, why each ended, numbers of tokens."""
        choices = []
        for index, (text, finish) in enumerate(answers):
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message} if self._asked.is_chat else {"text": text}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": finish})
        return {**self._head, "choices": choices, "usage": usage}

    def begin(self, index: int) -> list[Json]:
        """What a stream begins an answer with."""
        return [self._chunk(index, {"role": "assistant", "content": ""})] if self._asked.is_chat else []

    def piece(self, index: int, text: str) -> Json:
        """A piece of an answer's text."""
        return self._chunk(index, {"content": text}, text)

    def end(self, index: int, finish: Finish) -> Json:
        """The end of an answer."""
        return self._chunk(index, {}, finish=finish)

    def usage(self, usage: Json) -> list[Json]:
        """What a stream ends with, if its numbers of tokens were asked for."""
        return [self._event([], usage)] if self._asked.usage else []

    def _chunk(self, index: int, delta: Json, text: str = "", finish: Finish | None = None) -> Json:
        content: Json = {"delta": delta} if self._asked.is_chat else {"text": text}
        return self._event([{"index": index, **content, "logprobs": None, "finish_reason": finish}])

    def _event(self, choices: list[Json], usage: Json | None = None) -> Json:
        event = {**self._head, "choices": choices}
        if self._asked.is_chat:
            event["object"] = "chat.completion.chunk"
        return {**event, "usage": usage} if self._asked.usage else event


def usage_of(prompt: int, completion: int, cached: int) -> Json:
    """Numbers of tokens, as OpenAI counts them; `cached`: tokens of prompts that weren't computed again."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
