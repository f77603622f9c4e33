"""What became of a data file's rows, and one of them decoded, for a person to read before training."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from prge.data.columns import format_column_names
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import visible
from prge.objectives.examples import Example
from prge.objectives.preferences import ObjectiveName
from prge.system.terminal import best_effort

SHOWN_ROWS = 5
SHOWN_TOKENS = 8

INEXACT = "completions encoded apart, a token would straddle the end of the prompt"
TURN_INEXACT = "assistant turns that have a part of the generation prompt alone, learnt after that part"
TURN_REFUSED = "assistant turns that the chat template refuses to end with, not learnt"
SEVERAL = "chats that the template renders otherwise once they go on, an example for each way"
TOOLS_UNREAD = "tools that the chat template does not read"
KWARGS_UNREAD = "chat_template_kwargs that the chat template does not read"
LEFT_OUT = "that the chat template leaves out"
PROMPT_CUT = "prompts cut at the beginning"
END_CUT = "ends cut off, not learnt"
ENCODER_CUT = "texts cut at the end"
SPLIT = "longer than the bundle takes, split into several examples"
TURNS_SPLIT = "chats longer than the bundle takes, split between turns into several examples"
TURNS_CUT = "chats without their older turns, not learnt"
NO_ROOM_FOR_END = "texts that fill the bundle, learnt without an end-of-sequence token"
CONTROL_READ = "control tokens written in texts, read as control tokens"
CONTROL_IN_PROMPTS = "control tokens written in texts, read as control tokens in prompts alone"
CONTROL_AS_TEXT = "control tokens written in texts, read as the characters that they are"
CONTROL_IN_MESSAGES = "control tokens written in messages, read as the characters that they are"
CONTROL_OF_MESSAGES = "control tokens written in messages, read as control tokens"
CONTROL = (CONTROL_READ, CONTROL_IN_PROMPTS, CONTROL_AS_TEXT, CONTROL_IN_MESSAGES, CONTROL_OF_MESSAGES)
CONTEXT_CUT = "chats whose older turns don't fit before the answers that are learnt"
CUTS = (PROMPT_CUT, END_CUT, ENCODER_CUT, TURNS_CUT, CONTEXT_CUT)
# What KTO learns of labels that are all alike.
ONE_RATING = {
    "true": "all labels are true: KTO raises these answers far above other ones, and nothing says what isn't "
    "wanted; --objective completion learns them as they are",
    "false": "all labels are false: KTO lowers these answers, and nothing says what to write instead",
}
_LONGER = "an export with a larger --sequence-length keeps them whole"
_SPLIT = "--overflow split keeps them, or " + _LONGER
_AS_TEXT = "--control-tokens text reads them as characters"
REMEDIES = {
    **{
        PROMPT_CUT: _LONGER,
        NO_ROOM_FOR_END: _LONGER,
        END_CUT: _SPLIT,
        TURNS_CUT: _SPLIT,
        ENCODER_CUT: _LONGER,
        CONTEXT_CUT: _LONGER,
    },
    **dict.fromkeys((CONTROL_READ, CONTROL_IN_PROMPTS, CONTROL_OF_MESSAGES), _AS_TEXT),
    CONTROL_AS_TEXT: "--control-tokens special reads them as control tokens",
    CONTROL_IN_MESSAGES: "--control-tokens all reads them as control tokens",
}


@dataclass
class DataReport:
    """What became of the rows, for a person to read before training.

    `kind` says what they are, `columns` which of theirs were read and which not, in words, `read` which a row
    of this kind may have, `unread` which of theirs were not read, `objective` what is learnt of them;
    `dropped` target tokens didn't fit, `unknown` ones the tokenizer can't spell, `unusable` rows were left
    out; `written` are control tokens that are written in rows, by how they were read.
    """

    kind: str
    sequence_length: int
    columns: str = ""
    objective: ObjectiveName = "completion"
    dropped: int = 0
    rows: int = 0
    examples: int = 0
    lengths: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    unknown: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    notes: dict[str, list[int]] = field(default_factory=dict)
    unusable: dict[int, str] = field(default_factory=dict)
    read: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    written: dict[str, Counter[str]] = field(default_factory=dict)

    def note(self, event: str, row: int) -> None:
        """Record that something was done to a row; once a row."""
        numbers = self.notes.setdefault(event, [])
        if numbers[-1:] != [row]:
            numbers.append(row)

    @property
    def dropped_share(self) -> float:
        """Share of the target tokens that didn't fit."""
        return self.dropped / max(1, self.dropped + sum(self.targets))

    def counts(self) -> dict[str, Any]:
        """What `text` tells, as counts, without a name of the user's."""
        return {
            "rows": self.rows,
            "examples": self.examples,
            "tokens": sum(self.lengths),
            "target_tokens": sum(self.targets),
            "longest": max(self.lengths, default=0),
            "dropped_target_tokens": self.dropped,
            "unknown_target_tokens": self.unknown,
            "notes": {event: len(rows) for event, rows in self.notes.items()},
            "control_tokens": {event: count.total() for event, count in self.written.items()},
        }

    def summary(self) -> str:
        """A few lines: columns, lengths against the bundle's, learnt tokens, classes, cuts and their rows."""
        lines = [
            f"{self.kind}: {self.rows} rows, {self.examples} examples, {len(self.lengths)} sequences",
            f"  columns: {self.columns}",
            f"  tokens in a sequence: {min(self.lengths)} to {max(self.lengths)}, "
            f"mean {sum(self.lengths) / len(self.lengths):.1f}; the bundle takes {self.sequence_length}",
        ]
        if any(self.targets):
            lines.append(
                f"  target tokens: {sum(self.targets)} of {sum(self.lengths)} tokens, "
                f"at most {max(self.targets)} in a sequence"
                + (f"; {self.dropped} more don't fit" if self.dropped else "")
            )
        if self.unknown:
            lines.append(f"  {unknown_note(self.unknown, sum(self.targets))}")
        if self.classes:
            lines.append(
                "  classes: " + ", ".join(f"{name} {count}" for name, count in sorted(self.classes.items()))
            )
        return visible("\n".join([*lines, *(f"  {line}" for line in self.events())]))

    def events(self) -> list[str]:
        """What was done to rows, which, and what would keep them as they are, a line each."""
        lines = [
            ONE_RATING[label] for label in self.classes if self.objective == "kto" and len(self.classes) == 1
        ]
        for event, rows in self.notes.items():
            shown = ", ".join(str(row) for row in sorted(rows)[:SHOWN_ROWS]) + (
                ", ..." if len(rows) > SHOWN_ROWS else ""
            )
            mend = f"; {REMEDIES[event]}" if event in REMEDIES else ""
            counted = self._counted(event)
            lines.append(
                f"{event}: {len(rows)} {'row' if len(rows) == 1 else 'rows'} ({shown}){counted}{mend}"
            )
        return [visible(line) for line in lines]

    def _counted(self, event: str) -> str:
        """How often which control tokens are written in the rows of an event."""
        written = self.written.get(event, Counter()).most_common()
        more = ", ..." if len(written) > SHOWN_TOKENS else ""
        return "".join(f", {name} {count} times" for name, count in written[:SHOWN_TOKENS]) + more


def warn_unread(report: DataReport) -> None:
    """Print once which columns of rows aren't read, where nothing else of the report is printed."""
    if report.unread:
        _print_once(f"{report.kind}: columns that are not read: {format_column_names(report.unread)}")


@cache
def _print_once(line: str) -> None:
    with best_effort(sys.stderr):
        print(visible(line), file=sys.stderr, flush=True)


def unknown_note(unknown: int, targets: int) -> str:
    """What a user should know of target tokens that the tokenizer can't spell."""
    return (
        f"unknown: {unknown:,} of {targets:,} target tokens ({unknown / targets:.1%}) are characters that "
        "the tokenizer lacks: where they are is learnt, not which; clean the rows or take another model"
    )


def format_sample(example: Example, tokenizer: Tokenizer) -> str:
    """A decoded example: context as it reads, each learnt token in [brackets], candidates after an arrow."""
    lines = [f"row {example.row}"]
    for sequence in example.sequences:
        pieces = tokenizer.pieces(sequence.tokens)
        outside = []
        for target in sequence.targets:
            at = target.position + 1
            if at < len(pieces) and sequence.tokens[at] == target.token:
                pieces[at] = f"[{pieces[at]}]"
            else:
                right = " <- label" if target.candidate == example.label else ""
                outside.append(f"[{tokenizer.token(target.token)}]{right}")
        mine = {target.candidate for target in sequence.targets} == {example.label}
        lines.append("  " + "".join(pieces) + (" <- label" if mine and not outside else ""))
        lines += [f"    -> {line}" for line in outside]
    if example.label is not None and not any(sequence.targets for sequence in example.sequences):
        lines.append(f"    -> class {example.label} of {example.candidates}")
    return visible("\n".join(lines))
