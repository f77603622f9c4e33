"""Builds the examples of a bundle from the rows of a data file. Start reading here.

reader -> Row -> Texts or Candidates -> token ids and a mask -> sequences that fit -> Example

readers/, sources.py   read rows (a number and fields) from files, folders and data sets of the hub
row_format.py          the format of all rows of a file: a task's, or a form that their columns determine
segments.py            what a row becomes: `Texts` to train on, or `Candidates` to compare; both consist of
                       segments that are trained on or are context
forms/                 one file for each form of rows: completions.py (text; prompt and completion),
                       messages.py (messages, ShareGPT), instructions.py (Alpaca), preferences.py (pairs,
                       ratings), task_rows.py
encoding.py            tokenizes segments, with a mask of the tokens that are trained on
truncation.py          makes sequences fit the bundle: whole, cut or split
example_building.py    adds the targets, and records for the report what was done to which row
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import numpy as np

from prge.data.columns import RowError, format_columns, present_columns
from prge.data.encoding import EncodedText
from prge.data.forms.form import CONTROL_TOKENS
from prge.data.forms.task import Task
from prge.data.options import BuildOptions
from prge.data.readers.files import Row, Selection, select_rows
from prge.data.row_format import RowFormat, form_format, task_format
from prge.data.row_report import CONTROL, CONTROL_AS_TEXT, CONTROL_IN_PROMPTS, CONTROL_READ, CUTS, DataReport
from prge.data.segments import Candidates, Segmenter, Texts
from prge.data.sources import RowSource, read_source
from prge.data.tokenization.control_tokens import ControlTokens
from prge.data.tokenization.tokenizer import Tokenizer
from prge.data.truncation import SequenceFitter, shares_sequence
from prge.engine import Target, TokenSequence
from prge.errors import DataError, as_clause, format_value
from prge.model_spec import ModelSpec
from prge.objectives.examples import Example

if TYPE_CHECKING:
    from prge.data.tokenization.chat import ChatTemplate

# Maximum number of a candidate's tokens that an error lists.
MAX_SPELLED_TOKENS = 8
# Maximum number of tokens of a sequence with branches, as a share of the tokens of separate sequences.
_MAX_SHARE_WITH_BRANCHES = 7 / 8
_READ_AS: Mapping[ControlTokens, str] = {
    "special": CONTROL_READ,
    "all": CONTROL_READ,
    "prompt": CONTROL_IN_PROMPTS,
    "text": CONTROL_AS_TEXT,
}


def load_examples(
    source: RowSource | Path | str,
    tokenizer: Tokenizer,
    model: ModelSpec,
    task: Task | None = None,
    selection: Selection | None = None,
    options: BuildOptions | None = None,
    *,
    training: bool = True,
) -> tuple[list[Example], DataReport]:
    """Select rows of a source (default: all) and build their examples; a path is read as training rows."""
    if not isinstance(source, RowSource):
        source = read_source(source)
    chosen = select_rows(source.rows, selection or Selection())
    return build_examples(
        chosen,
        tokenizer,
        model,
        task,
        options,
        training=training,
        source=source.name,
        renamed=source.renamed,
    )


def build_examples(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    model: ModelSpec,
    task: Task | None = None,
    options: BuildOptions | None = None,
    *,
    training: bool = True,
    source: str = "the data",
    renamed: Mapping[str, str] | None = None,
    chat: ChatTemplate | None = None,
) -> tuple[list[Example], DataReport]:
    """Build the examples of rows for a bundle, and a report.

    Args:
        training: build examples of a task with the objective `completion` from the correct candidate only;
            false for an evaluation, which compares all candidates.
        source: name of the data in errors.
        renamed: names in the file of renamed columns, by their new names.
        chat: chat template for rows of messages; None compiles the tokenizer's template for this call.

    Raises:
        DataError: rows lack a column, hold an unknown label or nothing to learn, or don't fit. The error
            lists all rows and has the code of the first.
    """
    if not rows:
        raise DataError(f"{source} can't be used:", ["it has no rows"], code="rows-empty")
    options, present, renamed = options or BuildOptions(), present_columns(rows), renamed or {}
    if task is not None:
        row_format = task_format(rows, task, model, options, training, source)
    else:
        row_format = form_format(rows, tokenizer, model, options, source, renamed, chat)
    report = DataReport(
        f"{source} ({row_format.name})",
        model.sequence_length,
        format_columns(row_format.columns, present, renamed),
        row_format.objective,
        read=row_format.columns,
        unread=tuple(column for column in present if column not in row_format.columns),
    )
    overflow = row_format.default_overflow if options.overflow == "auto" else options.overflow
    segmenter = Segmenter(tokenizer, options.append_eos, options.control_tokens, row_format.chat)
    fitter = SequenceFitter(tokenizer, model.sequence_length, overflow)
    builder = _Builder(row_format, segmenter, fitter, model, report)
    examples = builder.build()
    if report.unusable and not (options.skip_unusable and examples):
        raise DataError(
            f"{source} has rows that can't be used:",
            [f"row {number}: {problem}" for number, problem in report.unusable.items()],
            remedy="Correct or remove these rows.",
            code=builder.codes[0],
        )
    _check_dropped(report, source, options.max_dropped)
    return examples, report


@dataclass(frozen=True)
class _Builder:
    """Builds the examples of rows and fills the report; `codes` are the error codes of unusable rows."""

    row_format: RowFormat
    segmenter: Segmenter
    fitter: SequenceFitter
    model: ModelSpec
    report: DataReport
    codes: list[str] = field(default_factory=list)

    def build(self) -> list[Example]:
        """Return the examples of all usable rows."""
        examples: list[Example] = []
        rows, report = self.row_format.rows, self.report
        for row in rows:
            try:
                examples += self._build_row(row)
            except RowError as problem:
                report.unusable[row.number] = str(problem)
                self.codes.append(problem.code)
            except DataError as error:
                report.unusable[row.number] = f"{as_clause(error.what)}: {'; '.join(error.problems)}"
                self.codes.append(error.code)
        report.rows = len(rows) - len(report.unusable)
        report.examples = len(examples)
        for example in examples:
            for sequence in example.sequences:
                report.lengths.append(len(sequence.tokens))
                report.targets.append(len(sequence.targets))
        return examples

    def _build_row(self, row: Row) -> list[Example]:
        """Return the examples of a row; raises RowError or DataError before the report changes."""
        segmenter, report = self._segmenter_of(row), self.report
        segments = self.row_format.segments(segmenter, row)
        fitted = self.fitter.fit(segments)
        self._check_vocabulary(fitted.sequences)
        examples = self._make_examples(row.number, segments, fitted.sequences)
        events = (*segments.events, *fitted.events)
        tokenizer = segmenter.tokenizer
        written = tokenizer.count_control([row.fields.get(column) for column in self.row_format.columns])
        if written and not any(event in CONTROL for event in events):
            events += (_READ_AS[segmenter.control_tokens],)
        for event in events:
            report.note(event, row.number)
            if event in CONTROL:
                report.written.setdefault(event, Counter()).update(written)
        report.dropped += fitted.dropped
        if tokenizer.unknown_id is not None:
            trained_ids = [each.ids[each.targets] for each in fitted.sequences]
            report.unknown += int(np.count_nonzero(np.concatenate(trained_ids) == tokenizer.unknown_id))
        if isinstance(segments, Candidates) and segments.class_name is not None:
            report.classes[segments.class_name] += 1
        is_cut = any(event in CUTS for event in events)
        return [replace(each, cut=is_cut, weight=segments.weight) for each in examples]

    def _segmenter_of(self, row: Row) -> Segmenter:
        """Return the segmenter of a row, which may have its own setting for control tokens."""
        setting = row.fields.get(CONTROL_TOKENS) if CONTROL_TOKENS in self.row_format.columns else None
        if setting is None:
            return self.segmenter
        if setting not in get_args(ControlTokens):
            known = ", ".join(get_args(ControlTokens))
            raise RowError(
                f"its {CONTROL_TOKENS} is {format_value(setting)}, must be one of {known}",
                code="control-tokens-unknown",
            )
        return replace(self.segmenter, control_tokens=cast(ControlTokens, setting))

    def _check_vocabulary(self, sequences: Sequence[EncodedText]) -> None:
        """Raise RowError if a token is not in the bundle's vocabulary."""
        largest = max(int(np.max(each.ids, initial=0)) for each in sequences)
        if largest >= self.model.vocabulary_size:
            raise RowError(
                f"it has the token {self.segmenter.tokenizer.token(largest)!r} ({largest}), "
                f"the bundle has {self.model.vocabulary_size} tokens: the tokenizer is not this bundle's",
                code="token-unknown",
            )

    def _make_examples(
        self, number: int, row: Texts | Candidates, sequences: Sequence[EncodedText]
    ) -> list[Example]:
        """Return an example for each sequence of texts, or one example that compares candidates."""
        if isinstance(row, Texts):
            return [Example(number, (_sequence(each),), 1, None, row.answers) for each in sequences]
        if shares_sequence(row, sequences):
            compared: tuple[TokenSequence, ...] = (self._shared_sequence(row, sequences),)
        else:
            compared = tuple(_sequence(each, index) for index, each in enumerate(sequences))
            longest = self.model.max_branched
            if longest and (branched := with_branches(compared, longest)):
                compared = (branched,)
        return [Example(number, compared, row.count, row.label, row.answers, row.choices, liked=row.is_liked)]

    def _shared_sequence(self, row: Candidates, sequences: Sequence[EncodedText]) -> TokenSequence:
        """Return the prompt of candidates of one token each, with a target for each candidate at its end."""
        candidates = [each.ids[each.targets].tolist() for each in sequences]
        tokens = [token for (token,) in candidates]
        if len(set(tokens)) < len(tokens):
            raise RowError(
                f"it has two candidates with the same token: {self._spelled(row, candidates)}",
                code="candidates-alike",
            )
        prompt = tuple(sequences[0].ids[: sequences[0].targets[0]].tolist())
        last = len(prompt) - 1
        return TokenSequence(
            prompt, tuple(Target(last, token, 1.0, index) for index, token in enumerate(tokens))
        )

    def _spelled(self, row: Candidates, candidates: Sequence[Sequence[int]]) -> str:
        """Format candidates with their tokens for an error."""
        texts = [text.segments[-1].text for text in row.texts]
        token = self.segmenter.tokenizer.token
        return ", ".join(
            f"{text!r} = " + " + ".join(repr(token(each)) for each in tokens[:MAX_SPELLED_TOKENS])
            for text, tokens in zip(texts, candidates, strict=True)
        )


def _sequence(text: EncodedText, candidate: int = 0) -> TokenSequence:
    """Return a sequence whose trained tokens are targets of a candidate, with equal weights."""
    tokens, targets = text.ids.tolist(), text.targets.tolist()
    return TokenSequence(
        tuple(tokens),
        tuple(Target(index - 1, tokens[index], 1 / len(targets), candidate) for index in targets),
    )


def with_branches(sequences: Sequence[TokenSequence], max_tokens: int) -> TokenSequence | None:
    """Return the sequences of candidates as one, in which each candidate is a branch after the common tokens.

    Args:
        sequences: a sequence for each candidate.
        max_tokens: maximum number of tokens of the result.

    Returns:
        The sequence; None if it is longer than `max_tokens`, or saves less than an eighth of the tokens.
    """
    # Tokens after a candidate's last target predict nothing. Each branch has a token at least.
    texts = [each.tokens[: each.targets[-1].position + 1] for each in sequences]
    columns = enumerate(zip(*(text[:-1] for text in texts), strict=False))
    common = next((index for index, column in columns if len({*column}) > 1), min(map(len, texts)) - 1)
    tokens, targets, branches = texts[0][:common], list[Target](), list[int]()
    for text, sequence in zip(texts, sequences, strict=True):
        shift = len(tokens) - common
        targets += [
            replace(target, position=target.position + shift * (target.position >= common))
            for target in sequence.targets
        ]
        branches.append(len(tokens))
        tokens += text[common:]
    separate = sum(map(len, texts))
    if not common or len(tokens) > max_tokens or len(tokens) > separate * _MAX_SHARE_WITH_BRANCHES:
        return None
    return TokenSequence(tokens, tuple(targets), tuple(branches))


def _check_dropped(report: DataReport, source: str, limit: float | None) -> None:
    """Raise DataError if the share of dropped target tokens exceeds the limit."""
    share = report.dropped_share
    if limit is not None and share > limit:
        targets = report.dropped + sum(report.targets)
        raise DataError(
            f"{source} would lose {share:.0%} of its target tokens:",
            [
                f"{report.dropped} of {targets} don't fit rows of {report.sequence_length} tokens; "
                f"--max-dropped is {limit:g}"
            ],
            remedy="Keep them with --overflow split or an export with a larger --sequence-length, or allow "
            "dropping them with a larger --max-dropped.",
            code="targets-dropped",
        )
