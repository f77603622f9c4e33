"""The report on a data file's rows that users read before training, and the display of an example."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from prge.data.columns import format_column_names
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import escape_control
from prge.objectives.examples import Example, without_branches
from prge.objectives.preferences import ObjectiveName
from prge.system.terminal import best_effort

SHOWN_ROWS = 5
SHOWN_TOKENS = 8

# Events of rows. Their texts are keys of stored reports.
INEXACT = "completions tokenized separately, as a token would span the end of the prompt"
TURN_INEXACT = "assistant turns that begin with a part of the generation prompt, trained on after that part"
TURN_REFUSED = "assistant turns that the chat template refuses as the last one, not trained on"
SEVERAL = "chats whose turns the template renders differently once others follow, split into several examples"
TOOLS_UNREAD = "tools that the chat template does not read"
KWARGS_UNREAD = "chat_template_kwargs that the chat template does not read"
LEFT_OUT = "that the chat template leaves out"
PROMPT_CUT = "prompts cut at the beginning"
END_CUT = "ends cut off, not trained on"
ENCODER_CUT = "texts cut at the end"
SPLIT = "longer than the bundle takes, split into several examples"
TURNS_SPLIT = "chats longer than the bundle takes, split between turns into several examples"
TURNS_CUT = "chats without their older turns, not trained on"
NO_ROOM_FOR_END = "texts that fill the bundle, trained on without an end-of-sequence token"
CONTROL_READ = "control tokens written in texts, read as control tokens"
CONTROL_IN_PROMPTS = "control tokens written in texts, read as control tokens in prompts alone"
CONTROL_AS_TEXT = "control tokens written in texts, read as the characters that they are"
CONTROL_IN_MESSAGES = "control tokens written in messages, read as the characters that they are"
CONTROL_OF_MESSAGES = "control tokens written in messages, read as control tokens"
CONTROL = (CONTROL_READ, CONTROL_IN_PROMPTS, CONTROL_AS_TEXT, CONTROL_IN_MESSAGES, CONTROL_OF_MESSAGES)
CONTEXT_CUT = "chats whose older turns don't fit before the answers that are trained on"
CUTS = (PROMPT_CUT, END_CUT, ENCODER_CUT, TURNS_CUT, CONTEXT_CUT)
# Warnings about ratings that are all equal.
ONE_RATING = {
    "true": "all labels are true: KTO makes these answers far more likely without examples of what to avoid; "
    "--objective completion trains on them directly",
    "false": "all labels are false: KTO makes these answers less likely without examples of what to write",
}
ONE_RATING_OF_GRPO = "all labels are equal: policy gradients learn only from differences of ratings"
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
    """The report on the rows of a data file.

    Attributes:
        title: source and format of the rows.
        sequence_length: longest sequence that the bundle takes.
        columns: text that says which columns are read.
        objective: objective of the training.
        dropped: target tokens that didn't fit.
        rows: number of usable rows.
        examples: number of examples.
        lengths: tokens of each sequence.
        targets: target tokens of each sequence.
        unknown: target tokens that the tokenizer can't spell.
        classes: number of rows of each class.
        notes: row numbers by event.
        unusable: problems of rows that were skipped, by row number.
        read: columns that rows of this format may have.
        unread: columns of the rows that are not read.
        written: control tokens that are written in rows, by event.
    """

    title: str
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
        """Record an event for a row, once for each row."""
        numbers = self.notes.setdefault(event, [])
        if numbers[-1:] != [row]:
            numbers.append(row)

    @property
    def dropped_share(self) -> float:
        """The share of the target tokens that didn't fit."""
        return self.dropped / max(1, self.dropped + sum(self.targets))

    def counts(self) -> dict[str, Any]:
        """Return the report as counts, without names of the user's files and columns."""
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
        """Return the report as text: columns, lengths, target tokens, classes, and events with their rows."""
        lines = [
            f"{self.title}: {self.rows} rows, {self.examples} examples, {len(self.lengths)} sequences",
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
        return escape_control("\n".join([*lines, *(f"  {line}" for line in self.events())]))

    def events(self) -> list[str]:
        """Return a line for each event, with its rows and a remedy."""
        lines = [
            ONE_RATING[label] for label in self.classes if self.objective == "kto" and len(self.classes) == 1
        ]
        lines += [ONE_RATING_OF_GRPO] * (self.objective == "grpo" and len(self.classes) == 1)
        for event, rows in self.notes.items():
            shown = ", ".join(str(row) for row in sorted(rows)[:SHOWN_ROWS]) + (
                ", ..." if len(rows) > SHOWN_ROWS else ""
            )
            remedy = f"; {REMEDIES[event]}" if event in REMEDIES else ""
            counts = self._control_counts(event)
            lines.append(
                f"{event}: {len(rows)} {'row' if len(rows) == 1 else 'rows'} ({shown}){counts}{remedy}"
            )
        return [escape_control(line) for line in lines]

    def _control_counts(self, event: str) -> str:
        """Return the counts of control tokens that are written in the rows of an event."""
        written = self.written.get(event, Counter()).most_common()
        more = ", ..." if len(written) > SHOWN_TOKENS else ""
        return "".join(f", {name} {count} times" for name, count in written[:SHOWN_TOKENS]) + more


def warn_unread(report: DataReport) -> None:
    """Print the columns that are not read, for callers that don't print the report; once for each line."""
    if report.unread:
        _print_once(f"{report.title}: columns that are not read: {format_column_names(report.unread)}")


@cache
def _print_once(line: str) -> None:
    with best_effort(sys.stderr):
        print(escape_control(line), file=sys.stderr, flush=True)


def unknown_note(unknown: int, targets: int) -> str:
    """Return a warning about target tokens that the tokenizer can't spell."""
    return (
        f"unknown: {unknown:,} of {targets:,} target tokens ({unknown / targets:.1%}) are characters that "
        "the tokenizer lacks: the model can't tell them apart; clean the rows or use another model"
    )


def format_sample(example: Example, tokenizer: Tokenizer) -> str:
    """Format an example: context as text, each target token in [brackets], candidates after an arrow."""
    lines = [f"row {example.row}"]
    for sequence in without_branches(example).sequences:
        tokens = sequence.tokens
        if example.sequences[0].branches:
            # A branch ends before its last target, which predicts nothing.
            tokens += (sequence.targets[-1].token,)
        token_texts = tokenizer.token_texts(tokens)
        extra_targets = []
        for target in sequence.targets:
            index = target.position + 1
            if index < len(token_texts) and tokens[index] == target.token:
                token_texts[index] = f"[{token_texts[index]}]"
            else:
                right = " <- label" if target.candidate == example.label else ""
                extra_targets.append(f"[{tokenizer.token(target.token)}]{right}")
        is_label = {target.candidate for target in sequence.targets} == {example.label}
        lines.append("  " + "".join(token_texts) + (" <- label" if is_label and not extra_targets else ""))
        lines += [f"    -> {line}" for line in extra_targets]
    if example.label is not None and not any(sequence.targets for sequence in example.sequences):
        lines.append(f"    -> class {example.label} of {example.candidates}")
    return escape_control("\n".join(lines))
