"""Chat templates: messages to the text that a model was trained on, and which characters the assistant wrote.

A template comes with the model and is untrusted: it runs in jinja2's immutable sandbox, in the environment
that transformers documents for chat templates (trimmed blocks, loop controls, `tojson`, `raise_exception`,
`strftime_now`, the `generation` tag), so that it renders the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prge.errors import BundleError, DataError

ASSISTANT = "assistant"
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
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise BundleError(
                f"the bundle's chat template can't be read: {error}", remedy="copy or export the bundle again"
            ) from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Text of a conversation, up to where the assistant begins to write with `add_generation_prompt`.

        Raises:
            DataError: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        # A template is a program of its own: any error in it is about these messages.
        except Exception as error:
            raise DataError(
                "the chat template refuses the messages", [str(error) or type(error).__name__]
            ) from None

    def assistant_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]], bool]:
        """Text of a conversation and the characters [start, end) of each assistant turn.

        A turn is what the text up to it has beyond the text before it with the generation prompt, closing
        tokens included. The returned flag is false where a turn as rendered doesn't begin with a generation
        prompt; the turn then begins right after the turn before it.

        Raises:
            DataError: the template refuses the messages, or renders a turn otherwise once others follow.
        """
        text = self.render(messages)
        spans: list[tuple[int, int]] = []
        exact = True
        for index, message in enumerate(messages):
            if message.get("role") != ASSISTANT:
                continue
            through = self.render(messages[: index + 1])
            if not text.startswith(through):
                raise DataError(
                    "the chat template can't be used for this conversation",
                    [f"it renders message {index + 1} otherwise when more messages follow"],
                    remedy="make one row of the messages up to each assistant turn",
                )
            before = self.render(messages[:index], add_generation_prompt=True)
            if not through.startswith(before):
                exact = False
                before = self.render(messages[:index])
                if not through.startswith(before):
                    raise DataError(
                        "the chat template can't be used for this conversation",
                        [f"where message {index + 1} begins can't be told from its text"],
                    )
            spans.append((len(before), len(through)))
        return text, spans, exact


def check_messages(messages: object) -> list[Message]:
    """The messages of a row; raises ValueError saying what they lack."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for index, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} has no role")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {index} ({message['role']}) has no content that is text")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise ValueError(f"no message has the role {ASSISTANT!r}: there is nothing to learn from")
    return list(messages)
