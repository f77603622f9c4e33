"""What rows become before they are tokenized: texts in segments, which are trained on or are context.

A row is either `Texts`, an example each or several, or `Candidates`, whose scores one example compares.
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
    """A part of a text, all of it trained on or none.

    `control` says which control tokens that are written in it are read as such, as for `Tokenizer.ids`.
    `name` names it in errors.
    """

    text: str
    is_trained: bool
    control: Control = False
    name: str = "text"


@dataclass(frozen=True)
class SegmentedText:
    """The text of one sequence, and how it is tokenized.

    `boundary` says what becomes of a token that would straddle the boundary of two segments:

    - `exact`: there is none, since the context is tokenized alone, as it is before an answer is generated.
      Such a text is one segment, or a context and what is trained;
    - `untrained`, `trained`: the text is tokenized as a whole, and a token that is partly trained counts so.

    `special_tokens` are those that are added: none to what a chat template wrote, the model's `begin`, the
    end-of-sequence token after it too, or an encoder's `begin` and `end`. `events` are for the report.

    `divide` gives shorter texts that together have the same trained segments, given what says whether a text
    fits; it raises DataError where the text can't be divided. None: it is divided between any two tokens.
    """

    segments: tuple[Segment, ...]
    boundary: Literal["exact", "untrained", "trained"] = "exact"
    special_tokens: Literal["none", "begin", "begin and eos", "begin and end"] = "begin"
    events: tuple[str, ...] = ()
    divide: Callable[[Callable[[SegmentedText], bool]], list[SegmentedText]] | None = None


@dataclass(frozen=True)
class Texts:
    """Texts whose trained segments are learnt, an example each or several.

    `answers` are the gold texts of a task's row. `events` are for the report, `weight` multiplies the loss.
    """

    texts: tuple[SegmentedText, ...]
    answers: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class Candidates:
    """Texts that begin alike, and whose trained segments are compared; or a text with classes to choose from.

    `comparison` says what they are:

    - `choices`: of a task's row, never cut; those of one token share a sequence;
    - `answers`: of a preference, cut where half of the bundle is too short for them;
    - `classes`: one text, none of it trained, for an encoder's head.

    `label` is the index of the right one, None where there is one text alone, or `is_liked` rates the first.
    `choices` are the candidates as they are compared with the gold texts `answers`. `class_name` is counted
    by the report, `events` and `weight` are as of `Texts`.
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
        """Number of scores."""
        return len(self.choices if self.comparison == "classes" else self.texts)


@dataclass(frozen=True)
class Segmenter:
    """What turns rows into segments: the model's chat template, and where written control tokens are such.

    `chat` is None where rows don't become messages. `append_eos`: an end-of-sequence token follows a text or
    a completion that is learnt.
    """

    tokenizer: Tokenizer
    append_eos: bool = True
    control_tokens: ControlTokens = "special"
    chat: ChatTemplate | None = None

    def text(self, text: str, *, is_trained: bool = True) -> Segment:
        """A whole text."""
        return Segment(text, is_trained, in_texts(self.control_tokens))

    def completed(self, prompt: str, completion: str, name: str = "completion") -> tuple[Segment, Segment]:
        """A prompt, and the completion that is learnt; `name` names it in errors."""
        return (
            Segment(prompt, False, in_prompts(self.control_tokens), "prompt"),
            Segment(completion, True, in_texts(self.control_tokens), name),
        )

    def learnt(self, *segments: Segment) -> SegmentedText:
        """A text that is learnt, with the end-of-sequence token after it."""
        return SegmentedText(segments, special_tokens="begin and eos" if self.append_eos else "begin")
