"""Rows of prompts, whose completions a reward scores: read, checked, and in the folder of a tuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prge.data.columns import present_columns
from prge.data.forms.form import Form, find_form
from prge.data.options import BuildOptions, Overflow
from prge.data.readers.files import Row, read_rows
from prge.data.row_report import DataReport
from prge.data.sources import RowSource
from prge.data.tokenization.tokenizer import Tokenizer
from prge.engine import Target, TokenSequence
from prge.errors import DataError
from prge.generation.prompts import Prompts
from prge.generation.row_prompts import RowPrompt, read_row_prompts
from prge.model_spec import ModelSpec
from prge.objectives.examples import Example
from server_export.tune.decisions import RowFacts
from server_export.tune.row_files import RowFiles
from server_export.tune.settings import TuneSettings
from server_export.tune.user_rows import UserRows


class PromptRows(UserRows):
    """UserRows that need only prompts; a reward may read all of their columns.

    Their examples learn to predict the prompts, which serves to compare tokenizers.
    """

    def _form(self, source: RowSource) -> Form:
        return find_form(source.rows, source.name, source.renamed, prompts_only=True)

    def _build(
        self, part: Any, rows: Sequence[Row], tokenizer: Tokenizer, model: ModelSpec, options: BuildOptions
    ) -> tuple[list[Example], DataReport]:
        source, settings = self._sources[part], self._settings
        prompts = Prompts(tokenizer, options.date, control_tokens=options.control_tokens)
        report = DataReport(source.name, model.sequence_length, "all, for the reward", "grpo")
        report.read = tuple(present_columns(source.rows))
        if settings.is_evolution:
            report.objective = "es"
        examples = []
        for row in rows:
            try:
                read, _ = read_row_prompts(source, [row], prompts)
                examples.append(_prediction(read[0], model.sequence_length - settings.max_completion_length))
            except DataError as error:
                report.unusable[row.number] = error.problems[0].removeprefix(f"row {row.number}: ")
        if report.unusable and not options.skip_unusable:
            raise DataError(
                f"{source.name} has rows that can't be used:",
                [f"row {row}: {why}" for row, why in report.unusable.items()],
                remedy="Shorten or remove them, or take a smaller --max-completion-length.",
                code="rows-unusable",
            )
        if not examples:
            problems = [f"row {row}: {why}" for row, why in report.unusable.items()]
            raise DataError(f"{source.name} has no row that can be used:", problems, code="rows-empty")
        report.rows = report.examples = len(examples)
        lengths = [len(example.sequences[0].tokens) for example in examples]
        report.lengths = [length + settings.max_completion_length for length in lengths]
        return examples, report


def _prediction(read: RowPrompt, room: int) -> Example:
    """Return the example of predicting the tokens of a prompt; raises DataError if it can't be completed."""
    tokens, row = read.prompt.tokens, read.row.number
    if not tokens:
        raise DataError("", [f"row {row}: its prompt is empty"], code="prompt-empty")
    if len(tokens) > room:
        problem = f"its prompt has {len(tokens)} tokens, there is room for {max(room, 0)} before a completion"
        raise DataError("", [f"row {row}: {problem}"], code="prompt-too-long")
    targets = tuple(Target(position, token, 1.0, 0) for position, token in enumerate(tokens[1:]))
    return Example(row, (TokenSequence(tokens, targets),), 1, None)


@dataclass(frozen=True)
class PromptFiles(RowFiles):
    """RowFiles of prompts.

    Attributes:
        max_length: maximum number of tokens of a completion.
        completions: completions of each prompt that a step trains on.
    """

    max_length: int = 0
    completions: int = 1

    @classmethod
    def of(cls, settings: TuneSettings) -> PromptFiles:
        """Return the files of a tuning."""
        return cls(
            settings.out / "rows",
            None,
            "es" if settings.is_evolution else "grpo",
            control_tokens=settings.control_tokens,
            date=settings.date,
            max_length=settings.max_completion_length,
            completions=1 if settings.is_evolution else settings.num_generations,
        )

    @property
    def has_messages(self) -> bool:
        """See RowFiles."""
        return bool(find_form(read_rows(self.train), str(self.train), prompts_only=True).chat)

    def facts(self, tokenizer: Tokenizer, model: ModelSpec, overflow: Overflow) -> RowFacts:
        """Measure the training prompts, each with a completion of the maximum length; see RowFiles."""
        lengths = [
            len(each.prompt.tokens) + self.max_length
            for each in self._read(read_rows(self.train), self._encoder(tokenizer))
        ]
        rows, count = len(lengths), self.completions
        targets = rows * count * self.max_length
        sizes = max(lengths), count * sum(lengths), count, targets
        return RowFacts(rows, *sizes, objective=self.objective, completed=True)

    def prompts(self, rows: Sequence[Row], tokenizer: Tokenizer) -> Iterator[Mapping[str, Any]]:
        """See RowFiles."""
        for each in self._read(rows, self._encoder(tokenizer)):
            yield {"prompt" if isinstance(each.source, str) else "messages": each.source}

    def _encoder(self, tokenizer: Tokenizer) -> Prompts:
        return Prompts(tokenizer, self.date, control_tokens=self.control_tokens)

    def _read(self, rows: Sequence[Row], prompts: Prompts) -> list[RowPrompt]:
        return read_row_prompts(RowSource(str(self.folder), [*rows], ""), rows, prompts)[0]
