"""Chat templates: render messages to text, and find the characters to train on.

A template comes with the model and is untrusted. It runs in jinja2's immutable sandbox, with the environment
that transformers documents for chat templates (trimmed blocks, loop controls, `tojson`, `raise_exception`,
`strftime_now`, the `generation` tag), so that it renders the same text as there. The sandbox runs in a child
process with limits on time and memory, because a template can loop and grow without end, and without access
to files, network and programs, in case the sandbox has a hole.

The rendered text depends only on the messages, the variables and one date, not on the clock or on random
numbers.
"""

from __future__ import annotations

import contextlib
import encodings.unicode_escape  # noqa: F401 (jinja2 imports it on demand, which the child can't)
import json
import random
import textwrap  # noqa: F401
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError, constants, debug, meta, nodes  # noqa: F401
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prge.data.tokenization.inputs import to_json_value
from prge.errors import BundleError, DataError, format_value
from prge.system.sandbox import BoundedChild, LimitError

ASSISTANT = "assistant"
# Limits for a row of up to a few kilobytes; longer rows get proportionally more.
SECONDS = 5.0
MEMORY = 256 << 20
MAX_SOURCE = 1_000_000
TEXT_PER_BYTE = 10
# Arguments that every template gets; no column of a row may replace them.
RESERVED = frozenset({"messages", "add_generation_prompt"})
# Keys of a message that say whether to train on it; templates don't get them.
_FLAGS = ("weight", "train")
# Names of the assistant's reasoning in data sets; templates read the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Keys that an answer may have besides its content.
_ANSWER_KEYS = ("tool_calls", *_REASONING)
# Noncharacters of Unicode, of which two that don't occur in a request mark the text in `generation` tags.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_WORD = "word"
Message = Mapping[str, Any]
Variables = Mapping[str, Any]
NO_VARIABLES: Variables = MappingProxyType({})


@dataclass(frozen=True)
class Rendering:
    """A conversation rendered as text.

    Attributes:
        text: text of the messages up to the last one that is trained on.
        turns: indices of the messages that are trained on in this text.
        spans: ranges [start, end) of characters to train on, in order.
        is_tagged: whether the template's `generation` tags determine the spans.
        is_exact: False if a rendered turn doesn't begin with the whole generation prompt; their common
            beginning is not trained on then.
    """

    text: str
    turns: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    is_tagged: bool
    is_exact: bool


class Generation(Extension):
    """Jinja's `generation` tag around the assistant's text, which renders its body between two marks."""

    tags = {"generation"}  # noqa: RUF012 (as declared by jinja2)
    marks = "", ""
    is_used = False

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the statements up to `endgeneration` to a block that calls `marked`."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Any) -> str:
        """Return the body's text between the marks."""
        start, end = self.marks
        return f"{start}{caller()}{end}"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        special_tokens: special tokens that the template may name (`bos_token`, `eos_token`, ...).
        date: date that the template sees as today, at midnight, in ISO 8601; None for the current date.

    Attributes:
        variables: names that the template reads besides the messages, such as `tools` and `enable_thinking`.

    Raises:
        BundleError: the source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], date: str | None = None) -> None:
        if len(source) > MAX_SOURCE:
            problem = f"has {len(source)} characters, more than the limit of {MAX_SOURCE}"
            raise _unusable_error(problem, "chat-template-too-large")
        self._date = date
        self._child = BoundedChild(_Renderer(), SECONDS, MEMORY)
        answer = self._request(source=source, special_tokens=dict(special_tokens))
        self.variables = frozenset(answer["variables"])

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        variables: Variables = NO_VARIABLES,
    ) -> str:
        """Render a conversation, with `add_generation_prompt` up to where the assistant's answer begins.

        Raises:
            DataError: the template refuses the messages.
            BundleError: the template exceeds the limits of time, memory or text.
        """
        response = self._request(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            variables=dict(variables),
            date=self._today(),
        )
        return str(response["text"])

    def renderings(
        self,
        messages: Sequence[Message],
        trained: Collection[int] | None = None,
        variables: Variables = NO_VARIABLES,
    ) -> list[Rendering]:
        """Render a conversation to texts for training: one, or several if turns are rendered differently.

        The text of a turn is the difference between the text up to the turn and the text before it with the
        generation prompt; it includes closing tokens. Turns share a text if the template renders the earlier
        turn as if nothing followed. A template with `generation` tags marks the assistant's text itself: its
        conversations are one text.

        Args:
            messages: the conversation.
            trained: indices of messages to train on; None for all assistant messages that no flag excludes.
            variables: arguments of the template, such as `tools`.

        Raises:
            DataError: the template refuses the messages, or the text of a turn can't be determined.
            BundleError: the template exceeds the limits of time, memory or text.
        """
        chosen = trained_turns(messages) if trained is None else sorted(trained)
        response = self._request(
            messages=list(messages), trained=chosen, variables=dict(variables), date=self._today()
        )
        return [
            Rendering(
                each["text"],
                tuple(each["turns"]),
                tuple((start, end) for start, end in each["spans"]),
                each["is_tagged"],
                each["is_exact"],
            )
            for each in response["renderings"]
        ]

    def left_out(self, messages: Sequence[Message], variables: Variables = NO_VARIABLES) -> list[str]:
        """Return what the template ignores: keys of the assistant's messages, and roles.

        Raises:
            DataError: the template refuses the messages.
            BundleError: the template exceeds the limits of time, memory or text.
        """
        roles = {message["role"] for message in messages} - {ASSISTANT, "user"}
        if not roles and not any(message.get(name) for message in messages for name in _ANSWER_KEYS):
            return []
        response = self._request(
            messages=list(messages), roles=sorted(roles), variables=dict(variables), date=self._today()
        )
        return [str(name) for name in response["left_out"]]

    def _today(self) -> str:
        return self._date or date.today().isoformat()

    def _request(self, **request: Any) -> dict[str, Any]:
        request = to_json_value(request, "the input of the chat template")
        try:
            response: dict[str, Any] = json.loads(self._child.call(json.dumps(request).encode()))
        except LimitError as error:
            raise _unusable_error(str(error), "chat-template-unbounded") from None
        if "refused" in response:
            raise _unusable_error(response["refused"], response["code"])
        if "problems" in response:
            raise DataError(
                response["what"], response["problems"], remedy=response["remedy"], code=response["code"]
            )
        try:
            for each in (response, *response.get("renderings", ())):
                each.get("text", "").encode()
        except UnicodeEncodeError:
            raise _unusable_error("writes half of a character", "half-character") from None
        return response


def _unusable_error(why: str, code: str) -> BundleError:
    what, remedy = f"The bundle's chat template {why}.", "Copy or export the bundle again."
    return BundleError(what, remedy=remedy, code=code)


class _Renderer:
    """The child's side: compiles the template of the first request and renders the messages of later ones."""

    def __init__(self) -> None:
        self._template: Any = None
        self._tag: Any = None
        self._source = ""
        self._special_tokens: dict[str, str] = {}
        self._variables: dict[str, Any] = {}
        self._today = datetime.min
        self._max_length = 0
        self._content_type: str | None = None

    def __call__(self, content: bytes) -> bytes:
        """Answer a request; request and response are JSON."""
        request: dict[str, Any] = json.loads(content)
        self._max_length = TEXT_PER_BYTE * len(content) + MAX_SOURCE
        try:
            response = self._respond(request)
        except DataError as error:
            response = {
                "what": error.what.split("\n")[0],
                "problems": error.problems,
                "remedy": error.remedy,
                "code": error.code,
            }
        except BundleError as error:
            response = {"refused": error.what, "code": error.code}
        return json.dumps(response).encode()

    def _respond(self, request: dict[str, Any]) -> dict[str, Any]:
        if "source" in request:
            self._special_tokens = request["special_tokens"]
            return {"variables": self._compile(request["source"])}
        self._variables = request["variables"]
        self._today = datetime.fromisoformat(request["date"])
        messages = request["messages"]
        if "roles" in request:
            return {"left_out": self._ignored_parts(messages, request["roles"])}
        if "trained" in request:
            return {"renderings": self._renderings(messages, request["trained"])}
        return {"text": self._render(messages, request["add_generation_prompt"])}

    def _compile(self, source: str) -> list[str]:
        """Compile the template and return its variables, except those that all templates get."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: self._today.strftime(layout)
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except MemoryError:
            raise
        except Exception as error:  # also RecursionError and errors of Python's compiler
            raise BundleError(f"can't be read: {error}", code="chat-template-damaged") from None
        self._source = source
        self._tag = environment.extensions[Generation.identifier]
        return sorted(names - environment.globals.keys() - self._special_tokens.keys() - RESERVED)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Render messages to text."""
        return self._render_with_spans(messages, add_generation_prompt)[0]

    def _render_with_spans(
        self, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the ranges of characters in `generation` tags."""
        if self._content_type is None:
            self._content_type = self._detect_content_type()
        text = self._render_marked([self._convert_message(each) for each in messages], add_generation_prompt)
        spans: list[tuple[int, int]] = []
        if self._tag.is_used:
            first, *parts = text.split(self._tag.marks[0])
            text = first
            for part in parts:
                inside, _, after = part.partition(self._tag.marks[1])
                spans += [(len(text), len(text) + len(inside))] if inside else []
                text += inside + after
        if len(text) > self._max_length:
            raise BundleError(
                f"renders a row to {len(text)} characters, more than the limit of {self._max_length}",
                code="chat-template-unbounded",
            )
        return text, spans

    def _render_marked(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Render messages to text with the marks of `generation` tags."""
        if self._tag.is_used:
            known = json.dumps([messages, self._variables], ensure_ascii=False) + self._source
            free = [mark for mark in _MARKS if mark not in known]
            if len(free) < 2:
                raise BundleError(
                    "got messages that contain all noncharacters of Unicode", code="chat-template-marks"
                )
            self._tag.marks = free[0], free[1]
        # A template may use random numbers: `random`, `lipsum`.
        random.seed(0)
        try:
            text: str = self._template.render(
                **{"tools": None, "documents": None, **self._special_tokens, **self._variables},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:
            raise
        # A template is a program: any exception in it concerns these messages.
        except Exception as error:
            raise DataError(
                "The chat template refuses the messages:",
                [str(error) or type(error).__name__],
                code="messages-refused",
            ) from None
        return text

    def _detect_content_type(self) -> str:
        """Return how the template reads contents: as `text`, as `parts` of type text, or `both`."""
        rendered = []
        for content in (_WORD, _parts_of(_WORD)):
            try:
                rendered.append(self._render_marked([{"role": "user", "content": content}], False))
            except DataError:
                rendered.append("")
        text, parts = rendered
        if text == parts and text:
            return "both"
        return "parts" if _WORD in parts and _WORD not in text else "text"

    def _convert_message(self, message: Message) -> dict[str, Any]:
        """Return a message as templates expect it: without nulls, with reasoning under its usual names."""
        converted = {
            name: value for name, value in message.items() if value is not None and name not in _FLAGS
        }
        reasoning = next((converted[name] for name in _REASONING if name in converted), None)
        if reasoning is not None:
            converted = {"thinking": reasoning, **converted, "reasoning_content": reasoning}
        content = converted.get("content")
        if isinstance(content, list) and self._content_type == "text":
            converted["content"] = content_text(content)
        if isinstance(content, str) and self._content_type == "parts":
            converted["content"] = _parts_of(content)
        return converted

    def _renderings(self, messages: Sequence[Message], trained: Sequence[int]) -> list[dict[str, Any]]:
        if self._tag.is_used:
            return [self._render_tagged(messages, trained)]
        texts_through: dict[int, str] = {}
        starts: dict[int, int] = {}
        is_exact: dict[int, bool] = {}
        problem: DataError | None = None
        for index in trained:
            try:
                text = self._render(messages[: index + 1])
            except DataError as error:  # a template may refuse a chat that ends here
                problem = problem or error
                continue
            texts_through[index], starts[index], is_exact[index] = self._locate_turn(messages, index, text)
        if problem is not None and (not texts_through or max(trained) not in texts_through):
            raise problem
        results = []
        rest = list(texts_through)
        while rest:
            text = texts_through[rest[-1]]
            turns = [index for index in rest if text.startswith(texts_through[index])]
            rest = [index for index in rest if index not in turns]
            results.append(
                {
                    "text": text,
                    "turns": turns,
                    "spans": [(starts[index], len(texts_through[index])) for index in turns],
                    "is_tagged": False,
                    "is_exact": all(is_exact[index] for index in turns),
                }
            )
        return results[::-1]

    def _locate_turn(self, messages: Sequence[Message], index: int, through: str) -> tuple[str, int, bool]:
        """Return the text up to a turn, its start, and whether the whole generation prompt precedes it.

        Args:
            messages: the conversation.
            index: index of the turn's message.
            through: rendered text of the messages up to the turn.
        """
        before = None  # templates expect at least one message
        if index:
            with contextlib.suppress(DataError):  # a template may require a question first
                before = self._render(messages[:index], True)
        if before is not None and through.startswith(before):
            return through, len(before), True
        header = self._generation_prompt()
        content = content_text(messages[index].get("content")).strip()
        end = through.rfind(content) if content else -1
        if before is not None:
            common = _common_length(before, through)
            if len(before) - common < len(header):
                return through, min(common, end) if end >= 0 else common, False
        # A turn may begin with a part of the generation prompt; more than half of it isn't a coincidence.
        sizes = range(len(header), len(header) // 2, -1)
        limit = end if end >= 0 else len(through)
        size = next((size for size in sizes if through.rfind(header[:size], 0, limit) >= 0), 0)
        start = through.rfind(header[:size], 0, limit) + size if size else -1
        if start < 0 and end >= 0:
            start = len(through[:end].rstrip())
        if start >= 0 and before is not None:
            # The template renders a question differently once it is answered; the prompt's rendering is used.
            return before + through[start:], len(before), True
        if start >= 0:
            return through, start, size == len(header)
        raise DataError(
            "The chat template can't be used for this conversation:",
            [f"the beginning of message {index + 1} can't be found in the rendered text"],
            remedy="Begin the conversation with a question, or give this message the weight 0.",
            code="turns-not-separable",
        )

    def _generation_prompt(self) -> str:
        """Return the text that the generation prompt adds to a question; empty if it is unknown."""
        question = [{"role": "user", "content": _WORD}]
        try:
            without, with_prompt = self._render(question), self._render(question, True)
        except DataError:
            return ""
        return with_prompt[_common_length(without, with_prompt) :]

    def _ignored_parts(self, messages: Sequence[Message], roles: Sequence[str]) -> list[str]:
        """Return the keys of answers and the roles that don't change the text."""
        text = self._render(messages)
        ignored = []
        for role in roles:
            others = [message for message in messages if message["role"] != role]
            if others and self._is_same(text, others):
                ignored.append(f"messages of the role {role}")
        for index, message in enumerate(messages):
            for name in _ANSWER_KEYS if message["role"] == ASSISTANT else ():
                if message.get(name) and name not in ignored:
                    shorter = {key: value for key, value in message.items() if key != name}
                    complete = self._try_render(messages[: index + 1])
                    if complete is not None and self._is_same(complete, [*messages[:index], shorter]):
                        ignored.append(name)
        return ignored

    def _is_same(self, text: str, messages: Sequence[Message]) -> bool:
        return self._try_render(messages) == text

    def _try_render(self, messages: Sequence[Message]) -> str | None:
        """Render messages; return None if the template refuses them."""
        try:
            return self._render(messages)
        except DataError:
            return None

    def _render_tagged(self, messages: Sequence[Message], trained: Sequence[int]) -> dict[str, Any]:
        """Render a conversation whose `generation` tags enclose the text to train on."""
        text, spans = self._render_with_spans(messages)
        written = [index for index, each in enumerate(messages) if each.get("role") == ASSISTANT]
        if list(trained) != written:
            ends = [0, *(len(self._render_with_spans(messages[: index + 1])[1]) for index in written)]
            if ends[-1] != len(spans) or ends != sorted({*ends}):
                raise DataError(
                    "The chat template can't be used for this conversation:",
                    ["its generation tags can't be assigned to messages, of which only some are trained on"],
                    remedy="Make one row of the messages up to each assistant turn to train on.",
                    code="turns-not-separable",
                )
            chosen = [number for number, index in enumerate(written) if index in set(trained)]
            spans = [span for number in chosen for span in spans[ends[number] : ends[number + 1]]]
        return {"text": text, "turns": list(trained), "spans": spans, "is_tagged": True, "is_exact": True}


def content_text(content: object) -> str:
    """Return the text of a message's content, which is a text, a list of text parts, or missing."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _common_length(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _parts_of(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def trained_turns(messages: Sequence[Message]) -> list[int]:
    """Return the indices of assistant messages, except those with `weight` 0 (as OpenAI) or `train` false."""
    return [
        index
        for index, message in enumerate(messages)
        if message["role"] == ASSISTANT
        and message.get("weight") != 0
        and message.get("train") not in (False, 0)
    ]


def check_messages(messages: object, *, answered: bool = True) -> list[Message]:
    """Check the messages of a row and return them without nulls; raises ValueError with the problem.

    Args:
        messages: the value of the row's column.
        answered: require an answer to train on; false to require a question as the last message.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    checked = [_check_message(index, message) for index, message in enumerate(messages, 1)]
    if not answered and checked[-1]["role"] == ASSISTANT:
        raise ValueError("the last message is the assistant's: there is nothing to answer")
    if answered and not any(message["role"] == ASSISTANT for message in checked):
        raise ValueError(f"no message has the role {ASSISTANT!r}: there is nothing to learn from")
    if answered and not trained_turns(checked):
        raise ValueError("every answer has the weight 0, or train false: there is nothing to learn from")
    return checked


def _check_message(index: int, message: object) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {index} has no role")
    checked = {name: value for name, value in message.items() if value is not None}
    where, content = f"message {index} ({checked['role']})", checked.get("content")
    if isinstance(content, list):
        for part in content:
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                part_type = part.get("type") if isinstance(part, dict) else part
                raise ValueError(
                    f"{where} has a part of the type {format_value(part_type)}: only text is supported"
                )
    elif not isinstance(content, str) and (content is not None or checked.keys() <= {"role", *_FLAGS}):
        raise ValueError(f"{where} has no text as content")
    for name in _FLAGS:
        if not isinstance(checked.get(name, 1), bool | int | float):
            allowed = "0 or 1" if name == "weight" else "true or false"
            raise ValueError(f"{where} has the {name} {format_value(checked[name])}, must be {allowed}")
    return checked
