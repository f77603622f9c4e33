"""Rows before tokenization: texts of segments, which are trained on or are context.

A row becomes either `Texts`, each of which gives one or several examples, or `Candidates`, whose scores one
example compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prge.data.tokenization.control_tokens import ControlTokens, in_prompts, in_texts
from prge.data.tokenization.tokenizer import Control, Tokenizer

if TYPE_CHECKING:
    from prge.data.tokenization.chat import ChatTemplate


@dataclass(frozen=True)
class Segment:
    """A part of a text that is trained on as a whole, or not at all.

    `control` says which control tokens that are written in the text are read as such, as for `Tokenizer.ids`.
    `name` is used in errors.
    """

    text: str
    is_trained: bool
    control: Control = False
    name: str = "text"


@dataclass(frozen=True)
class SegmentedText:
    """The text of one sequence, and how it is tokenized.

    `boundary` says how a token that would straddle the boundary of two segments is handled:

    - `exact`: There is no such token, since the context is tokenized separately, as before generating an
      answer. Such a text has one segment, or a context and a trained segment.
    - `untrained`, `trained`: The text is tokenized as a whole, and a straddling token is treated so.

    `special_tokens` are those to add: none for texts of a chat template, the model's `begin`, also the
    end-of-sequence token, or an encoder's `begin` and `end`. `events` are for the report.

    `divide` splits the text into shorter texts with the same trained segments, given a function that says
    whether a text fits. It raises DataError if the text can't be divided. If it is None, the text may be
    split between any two tokens.
    """

    segments: tuple[Segment, ...]
    boundary: Literal["exact", "untrained", "trained"] = "exact"
    special_tokens: Literal["none", "begin", "begin and eos", "begin and end"] = "begin"
    events: tuple[str, ...] = ()
    divide: Callable[[Callable[[SegmentedText], bool]], list[SegmentedText]] | None = None


@dataclass(frozen=True)
class Texts:
    """Texts to train on, each of which gives one or several examples.

    `answers` are the gold texts of a task's row. `events` are for the report. `weight` multiplies the loss.
    """

    texts: tuple[SegmentedText, ...]
    answers: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class Candidates:
    """Texts with a common beginning whose trained segments are compared, or a text with classes.

    `comparison` is the type of the candidates:

    - `choices`: Choices of a task's row, which are never cut; choices of one token share a sequence.
    - `answers`: Answers of a preference, which are cut if they need more than half of the bundle's length.
    - `classes`: Classes of one untrained text, for an encoder's head.

    `label` is the index of the correct candidate; it is None if there is only one text, or if `is_liked`
    rates the first. `choices` are the candidates as they are compared with the gold texts `answers`. The
    report counts `class_name`. `events` and `weight` are as for `Texts`.
    """

    texts: tuple[SegmentedText, ...]
    comparison: Literal["choices", "answers", "classes"]
    label: int | None
    is_liked: bool | None = None
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    class_name: str | None = None
    events: tuple[str, ...] = ()
    weight: float = 1.0

    @property
    def count(self) -> int:
        """The number of scores."""
        return len(self.choices if self.comparison == "classes" else self.texts)


@dataclass(frozen=True)
class Segmenter:
    """Converts texts of rows to segments.

    Attributes:
        tokenizer: the model's tokenizer.
        append_eos: append an end-of-sequence token to a trained text or completion.
        control_tokens: where control tokens that are written in rows are read as such.
        chat: the model's chat template; None if rows don't become messages.
    """

    tokenizer: Tokenizer
    append_eos: bool = True
    control_tokens: ControlTokens = "special"
    chat: ChatTemplate | None = None

    def text(self, text: str, *, is_trained: bool = True) -> Segment:
        """Return a whole text as a segment."""
        return Segment(text, is_trained, in_texts(self.control_tokens))

    def prompt_and_completion(
        self, prompt: str, completion: str, name: str = "completion"
    ) -> tuple[Segment, Segment]:
        """Return the segments of a prompt and of a trained completion, which errors call `name`."""
        return (
            Segment(prompt, False, in_prompts(self.control_tokens), "prompt"),
            Segment(completion, True, in_texts(self.control_tokens), name),
        )

    def trained_text(self, *segments: Segment) -> SegmentedText:
        """Return a text to train on, with an end-of-sequence token if `append_eos` is set."""
        return SegmentedText(segments, special_tokens="begin and eos" if self.append_eos else "begin")
