"""Control tokens that are written in rows, such as `<|im_end|>`, which are read as control tokens or as text.

A chat template writes control tokens around messages, and messages may contain the same characters. These are
replaced by placeholders before the template renders the messages, so that the control tokens in its text are
the template's own.

    messages      {"role": "user", "content": "What is <|im_end|>?"}
    rendered      <|im_start|>user\nWhat is 48...000001?<|im_end|>
    text          <|im_start|>user\nWhat is <|im_end|>?<|im_end|>
    control       ^                                    ^
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from prge.data.tokenization.tokenizer import Control, Tokenizer

ControlTokens = Literal["special", "prompt", "all", "text"]
_DIGITS = 6


def in_prompts(control_tokens: ControlTokens) -> bool:
    """Return whether control tokens that are written in a prompt are read as such."""
    return control_tokens != "text"


def in_texts(control_tokens: ControlTokens) -> bool:
    """Return whether control tokens that are written in a text or a completion are read as such."""
    return control_tokens in ("special", "all")


def in_messages(control_tokens: ControlTokens) -> bool:
    """Return whether control tokens that are written in messages are read as such."""
    return control_tokens == "all"


class MessageTexts:
    """Keeps control tokens in messages as text, while those of the chat template are read as control tokens.

    The template's arguments go through `protect`, and the rendered text through `restore`.
    """

    def __init__(self, tokenizer: Tokenizer, control_tokens: ControlTokens, messages: Sequence[Any]) -> None:
        self.written: Counter[str] = tokenizer.count_control(messages)
        """Counts of the control tokens that are written in the messages."""
        self._tokenizer = tokenizer
        self._names = sorted(self.written)
        self._mark = ""
        if self.written and not in_messages(control_tokens):
            # Digits pass a template's filters unchanged, and no message contains its own hash.
            content = json.dumps(messages, sort_keys=True, default=str).encode(errors="backslashreplace")
            self._mark = f"{int.from_bytes(hashlib.sha256(content).digest()[:8], 'big'):020}"

    def protect(self, value: Any) -> Any:
        """Replace control tokens in the texts of a JSON value by placeholders."""
        if not self._mark:
            return value
        if isinstance(value, str):
            return self._tokenizer.replace_control(value, self._placeholder)
        if isinstance(value, Mapping):
            return {self.protect(name): self.protect(each) for name, each in value.items()}
        return [self.protect(each) for each in value] if isinstance(value, list | tuple) else value

    def _placeholder(self, name: str) -> str:
        return f"{self._mark}{self._names.index(name):0{_DIGITS}}"

    def restore(self, rendered: str) -> RenderedText:
        """Replace placeholders in the rendered text by the control tokens."""
        if not self._mark:
            return RenderedText(rendered, True)
        pattern = re.compile(rf"{self._mark}(\d{{{_DIGITS}}})")
        placeholders = list(pattern.finditer(rendered))
        names = [self._names[int(each[1])] for each in placeholders]
        longer = (len(each[0]) - len(name) for each, name in zip(placeholders, names, strict=True))
        restored = RenderedText(
            pattern.sub(lambda match: self._names[int(match[1])], rendered),
            (),
            [each.start() for each in placeholders],
            [*accumulate(longer, initial=0)],
        )
        restored.control = [restored.position(position) for position in self._tokenizer.control_at(rendered)]
        return restored


class RenderedText:
    """A text rendered by a chat template, and which control tokens in it are read as such.

    Args:
        text: the text.
        control: control tokens that are read as such, as for `Tokenizer.ids`.
        placeholders: starts of the placeholders in the originally rendered text.
        longer: `longer[n]` is the difference in length between the first n placeholders and their tokens.
    """

    def __init__(
        self, text: str, control: Control, placeholders: Sequence[int] = (), longer: Sequence[int] = (0,)
    ) -> None:
        self.text = text
        self.control = control
        self._placeholders = placeholders
        self._longer = longer

    def position(self, rendered: int) -> int:
        """Convert a position in the originally rendered text to a position in `text`."""
        return rendered - self._longer[bisect_left(self._placeholders, rendered)]
