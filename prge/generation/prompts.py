"""Prompts: the tokens of a text, or of messages in the model's chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from prge.data.row_report import CONTROL_AS_TEXT, CONTROL_IN_MESSAGES, CONTROL_OF_MESSAGES, CONTROL_READ
from prge.data.tokenization.control_tokens import (
    ControlTokens,
    MessageTexts,
    RenderedText,
    in_messages,
    in_prompts,
)
from prge.data.tokenization.inputs import to_json_value
from prge.data.tokenization.tokenizer import Tokenizer, compile_chat_template
from prge.errors import DataError

if TYPE_CHECKING:
    from prge.data.tokenization.chat import ChatTemplate, Message

# Content of the messages with which a chat template is probed.
_PROBE = "answer"


@dataclass(frozen=True)
class Prompt:
    """The tokens that a completion follows, and what ends the completion."""

    tokens: tuple[int, ...]
    continues: bool = True
    """Whether the completion continues the prompt's text, so that a space before its first word belongs to
    it."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the completion, besides the tokenizer's `stop_ids`."""
    stop: tuple[str, ...] = ()
    """Words that end the completion and aren't part of it."""
    shown: frozenset[int] = frozenset()
    """Special tokens whose names are part of the completion's text."""


class Prompts:
    """Encodes texts and messages as prompts for the model of a tokenizer.

    A chat template runs in a child process that is forked at its first use. Access `chat` before an engine
    computes.

    Attributes:
        written: numbers of control tokens written in texts and messages, by how they were read.

    Args:
        tokenizer: tokenizer of the model.
        date: the date that the template gets as today's, in ISO 8601; None: the date of rendering.
        control_tokens: where control tokens that are written in texts and messages are read as control
            tokens; see the setting of the same name. It should be the same as in training.
    """

    def __init__(
        self, tokenizer: Tokenizer, date: str | None = None, *, control_tokens: ControlTokens = "special"
    ) -> None:
        self._tokenizer = tokenizer
        self._date = date
        self._control_tokens: ControlTokens = control_tokens
        self.written: dict[str, Counter[str]] = {}

    def _count(self, event: str, written: Counter[str]) -> None:
        if written:
            self.written.setdefault(event, Counter()).update(written)

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The model's chat template; None if it has none.

        Raises:
            BundleError: the template is invalid.
            DataError: jinja2 isn't installed.
        """
        return compile_chat_template(self._tokenizer, self._date)

    def encode_text(self, text: str, *, max_tokens: int | None = None) -> Prompt:
        """Encode a text without a chat template, after the tokens that begin a text of the model.

        If `max_tokens` is given, tokenization stops a little after that many tokens.
        """
        control = in_prompts(self._control_tokens)
        self._count(CONTROL_READ if control else CONTROL_AS_TEXT, self._tokenizer.count_control(text))
        tokens = self._tokenizer.ids(
            text, control=control, before=self._tokenizer.begin, max_tokens=max_tokens
        )
        return Prompt(tuple(tokens.tolist()))

    def encode_messages(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> Prompt:
        """Encode a conversation, up to where the assistant's message begins.

        Args:
            messages: the conversation, of which the last message is to be answered.
            variables: variables for the chat template, such as `tools`.

        Raises:
            DataError, BundleError: see `render`.
        """
        return self.encode_rendered(self.render(messages, variables))

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> RenderedText:
        """Format a conversation with the chat template, up to where the assistant's message begins.

        Args:
            messages: the conversation, of which the last message is to be answered.
            variables: variables for the chat template, such as `tools`.

        Raises:
            DataError: the model has no chat template, or the template rejects the messages.
            BundleError: the template is invalid, or takes too much time or memory.
        """
        if self.chat is None:
            raise DataError(
                "Messages can't be formatted:",
                ["the model has no chat template"],
                remedy="Export with --chat-template plain, use a chat model, or give a text as the prompt.",
                code="chat-template-missing",
            )
        _ = self._after_turn  # cached here, because it renders the template, too
        messages = to_json_value(list(messages), "messages")
        variables = to_json_value(dict(variables or {}), "variables of the chat template")
        texts = MessageTexts(self._tokenizer, self._control_tokens, [*messages, variables])
        is_read = in_messages(self._control_tokens)
        self._count(CONTROL_OF_MESSAGES if is_read else CONTROL_IN_MESSAGES, texts.written)
        text = self.chat.render(
            texts.protect(messages), add_generation_prompt=True, variables=texts.protect(variables)
        )
        return texts.restore(text)

    def encode_rendered(self, rendered: RenderedText, *, max_tokens: int | None = None) -> Prompt:
        """Encode a conversation that `render` formatted; `max_tokens` as for `encode_text`."""
        # The template writes special tokens itself: none are added.
        tokens = self._tokenizer.ids(rendered.text, control=rendered.control, max_tokens=max_tokens)
        ends, stop = self.end_of_turn
        return Prompt(tuple(tokens.tolist()), continues=False, ends=ends, stop=stop)

    @cached_property
    def _after_turn(self) -> str:
        """The text that the template writes after an assistant's message."""
        if self.chat is None:
            return ""
        turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        try:
            return self.chat.render(turns).rpartition(_PROBE)[2]
        except DataError:
            return ""

    @cached_property
    def end_of_turn(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """The tokens and the stop words that end an assistant's message, of which one or both are empty.

        It is the first control token of the text that the template writes after an assistant's message, or
        else that text. A model that was trained on messages ends them with it, whatever its end-of-sequence
        token is.
        """
        after_turn = self._after_turn
        tokens = self._tokenizer.encode(after_turn, control=True)
        special_ids = self._tokenizer.special_ids - {self._tokenizer.unknown_id}
        if special := [token for token in tokens if token in special_ids]:
            return frozenset(special[:1]), ()
        return frozenset(), (after_turn.rstrip(),) if after_turn.strip() else ()
