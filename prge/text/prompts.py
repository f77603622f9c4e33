"""What a model goes on from: the tokens of a text, or of a conversation in the model's chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from prge.errors import DataError
from prge.rows.report import CONTROL_AS_TEXT, CONTROL_IN_MESSAGES, CONTROL_OF_MESSAGES, CONTROL_READ
from prge.rows.tokenization.control_tokens import (
    ControlTokens,
    MessageTexts,
    RenderedText,
    in_messages,
    in_prompts,
)
from prge.rows.tokenization.inputs import checked_json
from prge.rows.tokenization.tokenizer import Tokenizer, compile_chat_template

if TYPE_CHECKING:
    from prge.rows.tokenization.chat import ChatTemplate, Message

_WORD = "answer"


@dataclass(frozen=True)
class Prompt:
    """Tokens that an answer follows."""

    tokens: tuple[int, ...]
    continues: bool = True
    """Whether the answer goes on in the prompt's text: a space before its first word belongs to it."""
    ends: frozenset[int] = frozenset()
    """Tokens that end this answer, beside the tokenizer's `stop_ids`."""
    stop: tuple[str, ...] = ()
    """Words that this answer ends before."""


class Prompts:
    """Makes prompts for the model of a tokenizer.

    `control_tokens` says where control tokens that are written in texts and messages are control tokens, as
    of rows, so that a model is asked as it was trained. `written` counts them by how they were read.

    A chat template runs in a child process that is forked at its first use: use it before an engine computes,
    by asking for `chat`.

    Args:
        tokenizer: of the model.
        date: day that the template takes for today, in ISO 8601; None: that on which it renders.
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
            BundleError: the template is damaged.
            DataError: jinja2 isn't installed.
        """
        return compile_chat_template(self._tokenizer, self._date)

    def of_text(self, text: str, *, most: int | None = None) -> Prompt:
        """A text as it is, after the model's `begin`.

        What has more than `most` tokens is read a little further than that.
        """
        control = in_prompts(self._control_tokens)
        self._count(CONTROL_READ if control else CONTROL_AS_TEXT, self._tokenizer.count_control(text))
        tokens = self._tokenizer.ids(text, control=control, before=self._tokenizer.begin, most=most)
        return Prompt(tuple(tokens.tolist()))

    def of_messages(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> Prompt:
        """A conversation up to where the assistant answers.

        Args:
            messages: that end with what is to be answered.
            variables: that the chat template is given, `tools` among them.

        Raises:
            DataError, BundleError: as `rendered`.
        """
        return self.of_rendered(self.rendered(messages, variables))

    def rendered(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> RenderedText:
        """The text of a conversation in the chat template; `variables` as of `of_messages`.

        Raises:
            DataError: the model has no chat template, or it refuses the messages.
            BundleError: the template is damaged, or takes too much time or memory.
        """
        if self.chat is None:
            raise DataError(
                "messages can't be answered",
                ["the model has no chat template"],
                remedy="export with --chat-template plain, use a chat model, or give a text as the prompt",
                code="chat-template-missing",
            )
        _ = self._after_turn  # from here on the template isn't asked
        messages = checked_json(list(messages), "messages")
        variables = checked_json(dict(variables or {}), "what the chat template is given")
        texts = MessageTexts(self._tokenizer, self._control_tokens, [*messages, variables])
        is_read = in_messages(self._control_tokens)
        self._count(CONTROL_OF_MESSAGES if is_read else CONTROL_IN_MESSAGES, texts.written)
        text = self.chat.render(
            texts.protect(messages), add_generation_prompt=True, variables=texts.protect(variables)
        )
        return texts.restore(text)

    def of_rendered(self, rendered: RenderedText, *, most: int | None = None) -> Prompt:
        """What the template made of a conversation, as tokens; `most` as of texts."""
        # The template writes the special tokens itself.
        tokens = self._tokenizer.ids(rendered.text, control=rendered.control, most=most)
        ends, stop = self.end_of_turn
        return Prompt(tuple(tokens.tolist()), continues=False, ends=ends, stop=stop)

    @cached_property
    def _after_turn(self) -> str:
        """What the template writes after an assistant's message."""
        if self.chat is None:
            return ""
        turns = [{"role": "user", "content": _WORD}, {"role": "assistant", "content": _WORD}]
        try:
            return self.chat.render(turns).rpartition(_WORD)[2]
        except DataError:
            return ""

    @cached_property
    def end_of_turn(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """The first control token of what the template writes after an assistant's message, else the words.

        A model that was trained on messages ends its answers with it, whatever its end-of-sequence token is.
        """
        after = self._after_turn
        tokens = self._tokenizer.encode(after, control=True)
        known = self._tokenizer.special_ids - {self._tokenizer.unknown_id}
        if special := [token for token in tokens if token in known]:
            return frozenset(special[:1]), ()
        return frozenset(), (after.rstrip(),) if after.strip() else ()
