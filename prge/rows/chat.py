"""Chat templates: messages to the text that a model was trained on, and which characters the assistant wrote.

A template comes with the model and is untrusted: it runs in jinja2's immutable sandbox, in the environment
that transformers documents for chat templates (trimmed blocks, loop controls, `tojson`, `raise_exception`,
`strftime_now`, the `generation` tag), so that it renders the same text. It does so in a child process with
bounds of time and memory, because a template can loop, grow and nest without end, and without a right to
files, network and programs, because the sandbox may have a hole.
"""

from __future__ import annotations

import encodings.unicode_escape  # noqa: F401 (jinja2 asks for these once a template does: the child couldn't)
import json
import textwrap  # noqa: F401
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, constants, debug, nodes  # noqa: F401
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prge.errors import BundleError, DataError
from prge.host.children import BoundedChild, LimitError

ASSISTANT = "assistant"
# Of a row of up to a few kilobytes; longer ones have proportionally more.
SECONDS = 5.0
MEMORY = 256 << 20
MOST_SOURCE = 1_000_000
TEXT_PER_BYTE = 10
Message = Mapping[str, Any]


class Generation(Extension):
    """The `generation` tag around what the assistant writes: renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements up to `endgeneration`, as they are."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes characters for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


class ChatTemplate:
    """A compiled chat template and the special tokens that it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template; raises BundleError where it isn't one."""
        if len(source) > MOST_SOURCE:
            raise _refused(f"has {len(source)} characters, at most {MOST_SOURCE} are read")
        self._child = BoundedChild(_Renderer(), SECONDS, MEMORY)
        self._ask(source=source, special_tokens=dict(special_tokens))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Text of a conversation, up to where the assistant begins to write with `add_generation_prompt`.

        Raises:
            DataError: the template refuses the messages.
            BundleError: it takes more than the bounds of time, memory or text.
        """
        answer = self._ask(messages=list(messages), add_generation_prompt=add_generation_prompt)
        return str(answer["text"])

    def assistant_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]], bool]:
        """Text of a conversation and the characters [start, end) of each assistant turn.

        A turn is what the text up to it has beyond the text before it with the generation prompt, closing
        tokens included. The returned flag is false where a turn as rendered doesn't begin with a generation
        prompt; the turn then begins right after the turn before it.

        Raises:
            DataError: the template refuses the messages, or renders a turn otherwise once others follow.
            BundleError: it takes more than the bounds of time, memory or text.
        """
        answer = self._ask(messages=list(messages), spans=True)
        return answer["text"], [(start, end) for start, end in answer["spans"]], answer["exact"]

    def _ask(self, **request: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self._child.ask(json.dumps(request).encode()))
        except LimitError as error:
            raise _refused(str(error)) from None
        if "refused" in answer:
            raise _refused(answer["refused"])
        if "problems" in answer:
            raise DataError(answer["what"], answer["problems"], remedy=answer["remedy"])
        try:
            answer.get("text", "").encode()
        except UnicodeEncodeError:
            raise _refused("writes half of a character") from None
        return answer


def _refused(why: str) -> BundleError:
    return BundleError(f"the bundle's chat template {why}", remedy="copy or export the bundle again")


class _Renderer:
    """The child's side: compiles the source of its first request, and renders the messages of the others."""

    def __init__(self) -> None:
        self._template: Any = None
        self._special_tokens: dict[str, str] = {}
        self._room = 0

    def __call__(self, content: bytes) -> bytes:
        """The answer to a request, both JSON."""
        request: dict[str, Any] = json.loads(content)
        self._room = TEXT_PER_BYTE * len(content) + MOST_SOURCE
        try:
            answer = self._answer(request)
        except DataError as error:
            answer = {"what": error.what.split("\n")[0], "problems": error.problems, "remedy": error.remedy}
        except BundleError as error:
            answer = {"refused": error.what}
        return json.dumps(answer).encode()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "source" in request:
            self._special_tokens = request["special_tokens"]
            self._compile(request["source"])
            return {}
        if request.get("spans"):
            text, spans, exact = self._assistant_spans(request["messages"])
            return {"text": text, "spans": spans, "exact": exact}
        return {"text": self._render(request["messages"], request["add_generation_prompt"])}

    def _compile(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # also RecursionError and what Python's own compiler says
            raise BundleError(f"can't be read: {error}") from None

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        try:
            text: str = self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except MemoryError:
            raise
        # A template is a program of its own: any error in it is about these messages.
        except Exception as error:
            raise DataError(
                "the chat template refuses the messages", [str(error) or type(error).__name__]
            ) from None
        if len(text) > self._room:
            raise BundleError(f"makes {len(text)} characters of a row, at most {self._room} are taken")
        return text

    def _assistant_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]], bool]:
        text = self._render(messages)
        spans: list[tuple[int, int]] = []
        exact = True
        for index, message in enumerate(messages):
            if message.get("role") != ASSISTANT:
                continue
            through = self._render(messages[: index + 1])
            if not text.startswith(through):
                raise DataError(
                    "the chat template can't be used for this conversation",
                    [f"it renders message {index + 1} otherwise when more messages follow"],
                    remedy="make one row of the messages up to each assistant turn",
                )
            before = self._render(messages[:index], True)
            if not through.startswith(before):
                exact = False
                before = self._render(messages[:index])
                if not through.startswith(before):
                    raise DataError(
                        "the chat template can't be used for this conversation",
                        [f"where message {index + 1} begins can't be told from its text"],
                    )
            spans.append((len(before), len(through)))
        return text, spans, exact


def check_messages(messages: object, *, answered: bool = True) -> list[Message]:
    """The messages of a row; raises ValueError saying what they lack.

    Args:
        messages: what the row has.
        answered: whether there must be an answer of the assistant's, or be one to make.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for index, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} has no role")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {index} ({message['role']}) has no content that is text")
    if answered and not any(message["role"] == ASSISTANT for message in messages):
        raise ValueError(f"no message has the role {ASSISTANT!r}: there is nothing to learn from")
    if not answered and messages[-1]["role"] == ASSISTANT:
        raise ValueError("the last message is the assistant's: there is nothing to answer")
    return list(messages)
