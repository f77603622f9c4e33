"""OpenAI's protocol: parses request bodies, and builds response bodies.

Parameters that would change a response and are not supported are refused, not ignored, such as penalties.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from device_runner.serving.tool_calls import ToolCall
from prge.data.columns import RowError
from prge.data.forms.messages import template_kwargs
from prge.data.readers.feedback import TEMPLATE_KWARGS
from prge.data.tokenization.chat import Message
from prge.errors import ConfigError, format_value
from prge.formats.documents import DocumentError, parse_json
from prge.generation.sampling import SamplingSettings

Json = dict[str, Any]
Finish = Literal["stop", "length", "tool_calls"]

MAX_CHOICES = 8
MAX_STOPS = 16
# OpenAI's limits.
MAX_TOOLS = 128
MAX_LOGPROBS = {"top_logprobs": 20, "logprobs": 5}
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

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
# Fields of one of the endpoints.
_CHAT = (
    "messages", "max_completion_tokens", TEMPLATE_KWARGS, "logprobs", "top_logprobs", "response_format",
    "tools", "tool_choice", "parallel_tool_calls",
)  # fmt: skip
_COMPLETION = ("prompt", "echo", "logprobs")
_CHOICE = tuple(item.name for item in fields(SamplingSettings))
_COMMON = ("model", "max_tokens", "n", "stop", "stream", "stream_options", "grammar", *_CACHE_KEYS, *_CHOICE)
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
    """Maximum number of tokens of a completion; None: all that fit into the context."""
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
    tools: tuple[Json, ...] = ()
    """Functions that the model may call; empty with the tool_choice `none`."""
    required: tuple[Json, ...] = ()
    """Functions of which the model has to call one; empty if it need not call any."""
    is_parallel: bool = True
    """Whether a completion may have several calls."""
    schema: object = None
    """JSON schema of the completion."""
    grammar: str = ""
    """Grammar of the completion."""
    logprobs: int | None = None
    """Number of most likely tokens to report with each token's log-probability; None: report none."""
    echo: bool = False
    """Whether the response begins with the prompt."""

    @property
    def is_chat(self) -> bool:
        """Whether the request has messages."""
        return bool(self.messages)

    @property
    def has_calls(self) -> bool:
        """Whether the request has tools, or messages with calls or their results."""
        return bool(self.tools) or any(
            each["role"] == "tool" or "tool_calls" in each for each in self.messages
        )


def read_chat(body: bytes) -> ParsedRequest:
    """Parse a request to /v1/chat/completions; raises RequestError."""
    content = _content(body, _CHAT)
    messages = content.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _field_error("messages", messages, "a list of at least one message")
    parsed = tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages))
    try:
        variables = template_kwargs(content.get(TEMPLATE_KWARGS, {}))
    except RowError as error:
        raise RequestError(400, str(error), param=TEMPLATE_KWARGS) from None
    has_logprobs = _switch(content, "logprobs", "logprobs")
    logprobs = _whole(content, "top_logprobs", 0, MAX_LOGPROBS["top_logprobs"], default=0)
    if logprobs and not has_logprobs:
        raise RequestError(400, "top_logprobs requires logprobs to be true", param="top_logprobs")
    tools = _tools(content)
    choice = content.get("tool_choice", "auto")
    request = replace(
        _parse_common(content, None, messages=parsed),
        variables=variables,
        tools=() if choice == "none" else tools,
        required=_required(choice, tools),
        is_parallel=_switch(content, "parallel_tool_calls", "parallel_tool_calls", default=True),
        schema=_schema(content.get("response_format", {"type": "text"})),
        logprobs=logprobs if has_logprobs else None,
    )
    formats = [request.schema is not None, request.grammar != "", bool(request.tools)]
    if sum(formats) > 1:
        what = "at most one of response_format, grammar and tools can be used in a request"
        raise RequestError(400, what, param="response_format" if formats[0] else "grammar")
    return request


def read_completion(body: bytes) -> ParsedRequest:
    """Parse a request to /v1/completions; raises RequestError."""
    content = _content(body, _COMPLETION)
    prompt = content.get("prompt")
    if isinstance(prompt, str) or _is_tokens(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _field_error("prompt", prompt, "a string, a list of tokens, or a list of these")
    for index, each in enumerate(prompt):
        if not isinstance(each, str) and not _is_tokens(each):
            raise _field_error(f"prompt[{index}]", each, "a string or a list of tokens")
    prompts = tuple(each if isinstance(each, str) else tuple(each) for each in prompt)
    echo, logprobs = _switch(content, "echo", "echo"), None
    if content.get("logprobs", False) is not False:
        logprobs = _whole(content, "logprobs", 0, MAX_LOGPROBS["logprobs"])
    # OpenAI's default for completions; chats have none. Without tokens, a response is its prompt.
    parsed = _parse_common(content, 16, prompts=prompts, fewest=0 if echo else 1)
    parsed = replace(parsed, echo=echo, logprobs=logprobs)
    if parsed.stream and echo:
        what = "echo: this server does not support that in a stream"
        raise RequestError(400, what, param="echo", code="unsupported_parameter")
    return parsed


def _schema(response_format: object) -> object:
    """Return the JSON schema of a response_format; None if it allows every text."""
    if isinstance(response_format, dict):
        described = response_format.get("json_schema")
        if response_format.get("type") == "text":
            return None
        if response_format.get("type") == "json_object":
            return {"type": "object"}
        if response_format.get("type") == "json_schema":
            schema = described.get("schema") if isinstance(described, dict) else None
            if not isinstance(schema, dict):
                raise _field_error(
                    "response_format.json_schema.schema", schema, "a JSON schema", param="response_format"
                )
            return schema
    needed = 'an object whose type is "text", "json_object" or "json_schema"'
    raise _field_error("response_format", response_format, needed)


def _tools(content: Json) -> tuple[Json, ...]:
    """Return the functions that a request describes."""
    tools = content.get("tools", [])
    if not isinstance(tools, list):
        raise _field_error("tools", tools, "a list of tools")
    if len(tools) > MAX_TOOLS:
        what = f"there are {len(tools)} tools, at most {MAX_TOOLS} are allowed"
        raise RequestError(400, what, param="tools")
    functions = []
    for index, tool in enumerate(tools):
        where, function = f"tools[{index}]", tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise _field_error(where, tool, 'an object of the type "function"', param="tools")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            needed = "up to 64 letters, digits, dots, dashes and underscores"
            raise _field_error(f"{where}.function.name", name, needed, param="tools")
        if not isinstance(parameters, dict | None):
            raise _field_error(f"{where}.function.parameters", parameters, "a JSON schema", param="tools")
        functions.append({each: value for each, value in function.items() if value is not None})
    return tuple(functions)


def _required(choice: object, tools: tuple[Json, ...]) -> tuple[Json, ...]:
    """Return the functions of which a tool_choice requires one to be called."""
    if choice in ("none", "auto"):
        return ()
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice == "required":
        required = tools
    elif isinstance(choice, dict) and choice.get("type") == "function" and isinstance(name, str):
        required = tuple(tool for tool in tools if tool["name"] == name)
    else:
        raise _field_error("tool_choice", choice, 'none, auto, required, or {"type": "function", ...}')
    if not required:
        what = f"tool_choice is {format_value(choice)}: tools has no such function"
        raise RequestError(400, what, param="tool_choice")
    return required


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
    index = _whole(content, "index", 0, default=0)
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
    fewest: int = 1,
) -> ParsedRequest:
    model = content.get("model")
    if not isinstance(model, str):
        raise _field_error("model", model, "the name of a model")
    most = default
    for name in _TOKENS:
        if name in content:
            most = _whole(content, name, fewest)
            break
    stop = content.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise _field_error("stop", content["stop"], "a string or a list of strings")
    if len(stop) > MAX_STOPS:
        raise RequestError(
            400, f"stop has {len(stop)} strings, at most {MAX_STOPS} are allowed", param="stop"
        )
    count = _whole(content, "n", 1, default=1)
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
    grammar = content.get("grammar", "")
    if not isinstance(grammar, str):
        raise _field_error("grammar", grammar, "a grammar in the syntax of Lark or of llama.cpp")
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
        grammar=grammar,
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
    for name in ("function_call", "audio", *(() if role == "assistant" else ("tool_calls",))):
        if message.get(name):
            raise RequestError(
                400,
                f"{where}.{name}: this server does not support that",
                param=where,
                code="unsupported_parameter",
            )
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise _field_error(f"{where}.tool_calls", calls, "a list of calls")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise _field_error(f"{where}.content", message.get("content"), "a string or parts of type text")
    more: Json = {}
    if role == "tool":
        for name in ("tool_call_id", "name"):
            if not isinstance(message.get(name, ""), str):
                raise _field_error(f"{where}.{name}", message[name], "a string")
        more = {name: message[name] for name in ("tool_call_id", "name") if name in message}
    if calls:
        more = {"tool_calls": [_call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(calls)]}
    return {"role": ROLES[role], "content": content, **more}


def _call(where: str, call: object) -> Json:
    """Return a call of an earlier completion as chat templates expect it: with arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _field_error(where, call, "an object with a function")
    name, arguments, identifier = function.get("name"), function.get("arguments"), call.get("id", "")
    if not all(isinstance(value, str) for value in (name, arguments, identifier)):
        raise _field_error(where, call, "a call whose id, name and arguments are strings")
    try:
        parsed = parse_json(str(arguments) or "{}")
    except DocumentError:
        parsed = None
    if not isinstance(parsed, dict):
        raise _field_error(f"{where}.function.arguments", arguments, "the JSON of an object")
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": parsed}}


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(type(each) is int and each >= 0 for each in value)


def _whole(content: Json, name: str, least: int, most: int | None = None, default: int | None = None) -> int:
    value = content.get(name, default)
    if type(value) is not int or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise _field_error(name, value, f"an integer {bounds}")
    return value


def _switch(content: Json, name: str, where: str, default: bool = False) -> bool:
    value = content.get(name)
    if value not in (None, True, False):
        raise _field_error(where, value, "true or false")
    return default if value is None else bool(value)


def _field_error(where: str, value: object, needed: str, *, param: str = "") -> RequestError:
    description = "is missing" if value is None else f"is {format_value(value)}"
    return RequestError(400, f"{where} {description}, must be {needed}", param=param or where)


@dataclass(frozen=True)
class Answer:
    """A completion as a response has it.

    Attributes:
        text: its text; after the calls are removed from it if there are any.
        finish: why it ended.
        calls: the calls of tools that the model wrote.
        logprobs: log-probabilities in the form of the endpoint.
    """

    text: str
    finish: Finish
    calls: tuple[ToolCall, ...] = ()
    logprobs: Json | None = None


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

    def whole(self, answers: list[Answer], usage: Json) -> Json:
        """Return the body of a response that is not streamed."""
        choices = []
        for index, answer in enumerate(answers):
            content: Json = {"text": answer.text}
            if self._request.is_chat:
                message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
                if answer.calls:
                    message |= {"content": answer.text or None, "tool_calls": _format_calls(answer.calls)}
                content = {"message": message}
            ending = {"logprobs": answer.logprobs, "finish_reason": answer.finish}
            choices.append({"index": index, **content, **ending})
        return {**self._head, "choices": choices, "usage": usage}

    def begin(self, index: int) -> list[Json]:
        """Return the first events of a streamed completion."""
        return [self._chunk(index, {"role": "assistant", "content": ""})] if self._request.is_chat else []

    def text_event(self, index: int, text: str) -> Json:
        """Return the event for a chunk of a completion's text."""
        return self._chunk(index, {"content": text}, text)

    def calls_event(self, index: int, calls: Sequence[ToolCall]) -> Json:
        """Return the event for the calls of a completion."""
        numbered = [{"index": number, **call} for number, call in enumerate(_format_calls(calls))]
        return self._chunk(index, {"tool_calls": numbered})

    def end(self, index: int, answer: Answer) -> Json:
        """Return the last event of a completion, which has the log-probabilities of all its tokens."""
        event = self._chunk(index, {}, finish=answer.finish)
        event["choices"][0]["logprobs"] = answer.logprobs
        return event

    def usage(self, usage: Json) -> list[Json]:
        """Return the last events of a stream: the token counts, if they were requested."""
        return [self._event([], usage)] if self._request.usage else []

    def _chunk(self, index: int, delta: Json, text: str = "", finish: Finish | None = None) -> Json:
        content: Json = {"delta": delta} if self._request.is_chat else {"text": text}
        return self._event([{"index": index, **content, "logprobs": None, "finish_reason": finish}])

    def _event(self, choices: list[Json], usage: Json | None = None) -> Json:
        event = {**self._head, "choices": choices}
        if self._request.is_chat:
            event["object"] = "chat.completion.chunk"
        return {**event, "usage": usage} if self._request.usage else event


def _format_calls(calls: Sequence[ToolCall]) -> list[Json]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def format_usage(prompt: int, completion: int, cached: int) -> Json:
    """Return the token counts in OpenAI's form; `cached`: prompt tokens that were not computed again."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
