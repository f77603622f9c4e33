"""Rows of a data file to the examples of one bundle. Begin to read here.

reader -> Row -> Texts or Candidates -> token ids and a mask -> sequences that fit -> Example

readers/, sources.py   files, and what else a user names, to rows: a number and fields
row_format.py          what all rows of a file are: of a task, or of a form by their columns
segments.py            what a row becomes: `Texts` are learnt, `Candidates` are compared; both are segments,
                       trained or not, and treated alike from here on
forms/                 a file for each form of rows makes them: completions.py (text; prompt and completion),
                       messages.py (messages, ShareGPT), instructions.py (Alpaca), preferences.py (pairs,
                       ratings), task_rows.py
encoding.py            segments to token ids with a mask of those that are learnt, by tokenization/
fitting.py             sequences that the bundle takes: whole, cut or split
example_building.py    their targets, and what was done to which row for the report
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import numpy as np

from prge.engine import Target, TokenSequence
from prge.errors import DataError, shown
from prge.learning.examples import Example
from prge.model_spec import ModelSpec
from prge.rows.build_options import BuildOptions
from prge.rows.columns import RowError, columns_text, present_columns
from prge.rows.encoding import EncodedText
from prge.rows.fitting import Fitter, shares_sequence
from prge.rows.forms.form import CONTROL_TOKENS
from prge.rows.forms.task import Task
from prge.rows.readers.files import Row, Selection, select_rows
from prge.rows.report import CONTROL, CONTROL_AS_TEXT, CONTROL_IN_PROMPTS, CONTROL_READ, CUTS, DataReport
from prge.rows.row_format import RowFormat, form_format, task_format
from prge.rows.segments import Candidates, Segmenter, Texts
from prge.rows.sources import Source, read_source
from prge.rows.tokenization.control_tokens import ControlTokens
from prge.rows.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from prge.rows.tokenization.chat import ChatTemplate

# Tokens of a candidate that an error spells.
SPELLED = 8
_READ_AS: Mapping[ControlTokens, str] = {
    "special": CONTROL_READ,
    "all": CONTROL_READ,
    "prompt": CONTROL_IN_PROMPTS,
    "text": CONTROL_AS_TEXT,
}


def load_examples(
    source: Source | Path | str,
    tokenizer: Tokenizer,
    model: ModelSpec,
    task: Task | None = None,
    selection: Selection | None = None,
    options: BuildOptions | None = None,
    *,
    training: bool = True,
) -> tuple[list[Example], DataReport]:
    """Select rows of a source, by default all, and build their examples; a path is read as training rows."""
    if not isinstance(source, Source):
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
    """Tokenize rows for a bundle.

    Args:
        training: build a task of objective `completion` with its right candidate alone; an evaluation
            (false) compares all candidates, in any number of sequences.
        source: names the data in errors.
        renamed: columns that have other names in the file, with these.
        chat: renders rows of messages; None: the tokenizer's chat template, compiled for this call.

    Raises:
        DataError: rows that lack a column, hold an unknown label, nothing to learn, or don't fit; all named,
            with the code of the first.
    """
    if not rows:
        raise DataError(f"{source} can't be used", ["it has no rows"], code="rows-empty")
    options, present, renamed = options or BuildOptions(), present_columns(rows), renamed or {}
    if task is not None:
        row_format = task_format(rows, task, model, options, training, source)
    else:
        row_format = form_format(rows, tokenizer, model, options, source, renamed, chat)
    report = DataReport(
        f"{source} ({row_format.name})",
        model.sequence_length,
        columns_text(row_format.columns, present, renamed),
        row_format.objective,
        read=row_format.columns,
        unread=tuple(column for column in present if column not in row_format.columns),
    )
    overflow = row_format.usual_overflow if options.overflow == "auto" else options.overflow
    segmenter = Segmenter(tokenizer, options.append_eos, options.control_tokens, row_format.chat)
    fitter = Fitter(tokenizer, model.sequence_length, overflow)
    builder = _Builder(row_format, segmenter, fitter, model, report)
    examples = builder.build()
    if report.unusable and not (options.skip_unusable and examples):
        raise DataError(
            f"{source} has rows that can't be used",
            [f"row {number}: {problem}" for number, problem in report.unusable.items()],
            remedy="correct or remove these rows",
            code=builder.codes[0],
        )
    _check_dropped(report, source, options.max_dropped)
    return examples, report


@dataclass(frozen=True)
class _Builder:
    """Makes the examples of rows; what became of them, and what is wrong with some, goes into the report.

    `codes` are those of the rows that can't be used.
    """

    row_format: RowFormat
    segmenter: Segmenter
    fitter: Fitter
    model: ModelSpec
    report: DataReport
    codes: list[str] = field(default_factory=list)

    def build(self) -> list[Example]:
        """The examples of all rows that can be used."""
        examples: list[Example] = []
        rows, report = self.row_format.rows, self.report
        for row in rows:
            try:
                examples += self._of_row(row)
            except RowError as problem:
                report.unusable[row.number] = str(problem)
                self.codes.append(problem.code)
            except DataError as error:
                headline = error.what.partition("\n")[0]
                report.unusable[row.number] = f"{headline}: {'; '.join(error.problems)}"
                self.codes.append(error.code)
        report.rows = len(rows) - len(report.unusable)
        report.examples = len(examples)
        for example in examples:
            for sequence in example.sequences:
                report.lengths.append(len(sequence.tokens))
                report.targets.append(len(sequence.targets))
        return examples

    def _of_row(self, row: Row) -> list[Example]:
        """The examples of a row; raises RowError or DataError, and then nothing of it is in the report."""
        segmenter, report = self._segmenter_of(row), self.report
        segments = self.row_format.segments(segmenter, row)
        fitted = self.fitter.fit(segments)
        self._check_vocabulary(fitted.sequences)
        examples = self._make(row.number, segments, fitted.sequences)
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
            learnt = [each.ids[each.targets] for each in fitted.sequences]
            report.unknown += int(np.count_nonzero(np.concatenate(learnt) == tokenizer.unknown_id))
        if isinstance(segments, Candidates) and segments.class_name is not None:
            report.classes[segments.class_name] += 1
        is_cut = any(event in CUTS for event in events)
        return [replace(each, cut=is_cut, weight=segments.weight) for each in examples]

    def _segmenter_of(self, row: Row) -> Segmenter:
        """What makes segments of a row, which may say itself where control tokens are such."""
        own = row.fields.get(CONTROL_TOKENS) if CONTROL_TOKENS in self.row_format.columns else None
        if own is None:
            return self.segmenter
        if own not in get_args(ControlTokens):
            known = ", ".join(get_args(ControlTokens))
            raise RowError(
                f"its {CONTROL_TOKENS} is {shown(own)}, must be one of {known}", code="control-tokens-unknown"
            )
        return replace(self.segmenter, control_tokens=cast(ControlTokens, own))

    def _check_vocabulary(self, sequences: Sequence[EncodedText]) -> None:
        """Raise RowError if a token isn't the bundle's."""
        largest = max(int(np.max(each.ids, initial=0)) for each in sequences)
        if largest >= self.model.vocabulary_size:
            raise RowError(
                f"has the token {self.segmenter.tokenizer.token(largest)!r} ({largest}), "
                f"the bundle knows {self.model.vocabulary_size}: the tokenizer is not this bundle's",
                code="token-unknown",
            )

    def _make(self, number: int, row: Texts | Candidates, sequences: Sequence[EncodedText]) -> list[Example]:
        """Examples of sequences: of each where they are texts, else one that compares them."""
        if isinstance(row, Texts):
            return [Example(number, (_sequence(each),), 1, None, row.answers) for each in sequences]
        if shares_sequence(row, sequences):
            compared: tuple[TokenSequence, ...] = (self._shared_sequence(row, sequences),)
        else:
            compared = tuple(_sequence(each, index) for index, each in enumerate(sequences))
        return [Example(number, compared, row.count, row.label, row.answers, row.choices, liked=row.is_liked)]

    def _shared_sequence(self, row: Candidates, sequences: Sequence[EncodedText]) -> TokenSequence:
        """The prompt of candidates of one token, with a target for each at its last token."""
        candidates = [each.ids[each.targets].tolist() for each in sequences]
        tokens = [token for (token,) in candidates]
        if len(set(tokens)) < len(tokens):
            raise RowError(
                f"has two candidates that are one token: {self._spelled(row, candidates)}",
                code="candidates-alike",
            )
        prompt = tuple(sequences[0].ids[: sequences[0].targets[0]].tolist())
        at = len(prompt) - 1
        return TokenSequence(
            prompt, tuple(Target(at, token, 1.0, index) for index, token in enumerate(tokens))
        )

    def _spelled(self, row: Candidates, candidates: Sequence[Sequence[int]]) -> str:
        """Candidates with their tokens, for an error."""
        texts = [text.segments[-1].text for text in row.texts]
        token = self.segmenter.tokenizer.token
        return ", ".join(
            f"{text!r} = " + " + ".join(repr(token(each)) for each in tokens[:SPELLED])
            for text, tokens in zip(texts, candidates, strict=True)
        )


def _sequence(text: EncodedText, candidate: int = 0) -> TokenSequence:
    """A sequence whose learnt tokens are targets of a candidate, with equal weights."""
    tokens, targets = text.ids.tolist(), text.targets.tolist()
    return TokenSequence(
        tuple(tokens),
        tuple(Target(index - 1, tokens[index], 1 / len(targets), candidate) for index in targets),
    )


def _check_dropped(report: DataReport, source: str, limit: float | None) -> None:
    """Raise DataError if more target tokens would be left out than the options allow."""
    share = report.dropped_share
    if limit is not None and share > limit:
        targets = report.dropped + sum(report.targets)
        raise DataError(
            f"{source} would lose {share:.0%} of its target tokens",
            [
                f"{report.dropped} of {targets} don't fit rows of {report.sequence_length} tokens; "
                f"--max-dropped is {limit:g}"
            ],
            remedy="keep them all with --overflow split, or export with a larger --sequence-length; or "
            "leave them out with a larger --max-dropped",
            code="targets-dropped",
        )
