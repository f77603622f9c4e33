"""The rows that a user names, in memory: whatever can be wrong in them is found before anything is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prge.errors import DataError
from prge.learning.examples import Example
from prge.learning.preferences import make_objective
from prge.model_spec import ModelSpec
from prge.rows.build_options import BuildOptions, Overflow
from prge.rows.example_building import build_examples
from prge.rows.forms.form import find_form
from prge.rows.forms.task import load_task
from prge.rows.readers.files import Row, Selection, select_rows
from prge.rows.readers.splitting import split_rows
from prge.rows.report import DataReport
from prge.rows.sources import Part, Source, holding_part, read_source
from prge.rows.tokenization.tokenizer import Tokenizer
from prge.verbs.kinds import Paths
from server_export.tune.settings import TuneSettings

# More tokens than any row has: nothing is cut while rows are measured.
_NO_BOUND = 1 << 24
_SHOWN_ROWS = 5


class NamedRows:
    """Training rows, and development and test rows where a user names them or a folder has them.

    `notes` tell what a user should know, a line each.

    Raises:
        DataError: rows can't be read at all.
    """

    def __init__(self, settings: TuneSettings) -> None:
        self._settings = settings
        self._task = load_task(settings.task) if settings.task else None
        self._broken: dict[Part, list[str]] = {}
        self.notes: list[str] = []
        self._classes: dict[int, Example] = {}
        named: dict[Part, Paths | None] = {"train": settings.data, "dev": settings.dev, "test": settings.test}
        self._sources: dict[Part, Source] = {}
        for part, given in named.items():
            where = holding_part(settings.data, part) if given is None else given
            if where is not None:
                self._sources[part] = source = self._read(where, part)
                called = "" if part == "train" else f"{part}: "
                self.notes.append(f"{called}{len(source.rows):,} rows from {source.name}")
                self.notes += filter(None, [source.told])

    @property
    def chat(self) -> str:
        """Whether rows `needs` a chat template, `takes` one where there is one, or neither, ""."""
        train = self._sources["train"]
        if self._task:
            return ""
        return find_form(train.rows, train.name, train.renamed, objective=self._settings.objective).chat

    @property
    def are_texts(self) -> bool:
        """Whether a model learns to write what the rows hold, and not to choose among candidates."""
        return self._task is None or self._task.generate is not None

    def some(self, count: int, tokenizer: Tokenizer, model: ModelSpec) -> list[Example]:
        """Examples of a random choice of training rows as a run of the model takes them."""
        rows = select_rows(self._sources["train"].rows, Selection(limit=count, shuffle_seed=0))
        examples, _ = self._built(
            "train",
            rows,
            tokenizer,
            _unbounded(model),
            self._options("auto"),
        )
        return examples

    def check(self, tokenizer: Tokenizer, model: ModelSpec) -> int:
        """Leave out rows that can't be used; returns the tokens of the longest training row.

        Raises:
            DataError: there are such rows, and the settings don't say to skip them; all are named.
            ConfigError: settings belong to another objective than that of the rows.
        """
        longest = 0
        problems: dict[str, list[str]] = {}
        for part, source in self._sources.items():
            options = self._options("auto", skip_unusable=True)
            examples, report = self._built(part, source.rows, tokenizer, _unbounded(model), options)
            found = [
                *self._broken.pop(part, ()),
                *(f"row {row}: {why}" for row, why in report.unusable.items()),
            ]
            if found:
                problems[source.name] = found
                count = "1 row" if len(found) == 1 else f"{len(found)} rows"
                self.notes.append(f"left out {count} of {source.name}:")
                self.notes += [f"  {each}" for each in found[:_SHOWN_ROWS]]
                self.notes += [f"  ... and {len(found) - _SHOWN_ROWS} more"] * (len(found) > _SHOWN_ROWS)
                kept = [row for row in source.rows if row.number not in report.unusable]
                self._sources[part] = replace(source, rows=kept)
            if part == "train":
                make_objective(report.objective, self._settings)
                longest = max(report.lengths)
                self._classes = {each.row: each for each in examples} if model.is_encoder else {}
        if problems and self._settings.on_bad_row == "stop":
            several = len(problems) > 1
            raise DataError(
                f"{' and '.join(problems)} {'have' if several else 'has'} rows that can't be used:",
                [f"{name}: {each}" if several else each for name, them in problems.items() for each in them],
                remedy="correct or remove them, or leave them out with --on-bad-row skip",
                code="rows-unusable",
            )
        return longest

    def split(self, tokenizer: Tokenizer, model: ModelSpec) -> dict[Part, list[Row]]:
        """The rows of all parts; development rows are split off where none are named.

        Args:
            tokenizer: of the bundle.
            model: of its evaluations: what it has no room for is noted.

        Raises:
            DataError: more target tokens than the settings allow would be left out, or a class of an encoder
            has no training row.
        """
        settings = self._settings
        options = self._options(settings.overflow, max_dropped=settings.max_dropped)
        for part, source in self._sources.items():
            _, report = self._built(part, source.rows, tokenizer, model, options)
            self.notes.append(f"{source.name}: columns: {report.columns}")
            self.notes += [f"{source.name}: {event}" for event in report.events()]
            if not self._task:
                self._sources[part] = replace(source, rows=[_only(row, report.read) for row in source.rows])
        parts: dict[Part, list[Row]] = {part: source.rows for part, source in self._sources.items()}
        if "dev" not in parts:
            columns = self._task.needed_columns() if self._task else None
            made = split_rows(parts["train"], columns=columns)
            parts |= {"train": made.train, "dev": made.dev}
            self.notes += made.notes
        if model.is_encoder:
            self._check_classes([self._classes[row.number] for row in parts["train"]])
        return parts

    def _check_classes(self, examples: Sequence[Example]) -> None:
        """Raise DataError if a class has no training row: an encoder's head can't know it."""
        lacking = set(range(examples[0].candidates)) - {example.label for example in examples}
        if lacking:
            name, words = self._sources["train"].name, examples[0].choices
            raise DataError(
                f"{name} can't be used:",
                [f"no training row is of the class {words[label].strip()!r}" for label in sorted(lacking)],
                remedy="give rows of every class, at least two where development rows are split off",
                code="class-without-rows",
            )

    def _read(self, where: Paths, part: Part) -> Source:
        """The rows that a user names."""
        broken = self._broken.setdefault(part, [])
        source = read_source(
            where, part, self._settings.columns, broken, self._settings.objective, self._task
        )
        if not self._task:  # rows of no form are refused before anything else is done
            find_form(source.rows, source.name, source.renamed, objective=self._settings.objective)
        return source

    def _options(self, overflow: Overflow, **more: Any) -> BuildOptions:
        given = self._settings
        return BuildOptions(
            overflow,
            given.append_eos,
            objective=given.objective,
            control_tokens=given.control_tokens,
            date=given.date,
            **more,
        )

    def _built(
        self,
        part: Part,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        model: ModelSpec,
        options: BuildOptions,
    ) -> tuple[list[Example], DataReport]:
        source = self._sources[part]
        return build_examples(
            rows,
            tokenizer,
            model,
            self._task,
            options,
            training=part == "train",
            source=source.name,
            renamed=source.renamed,
        )


def _only(row: Row, columns: Sequence[str]) -> Row:
    """A row with some columns alone."""
    return Row(row.number, {name: row.fields[name] for name in columns if name in row.fields})


def _unbounded(model: ModelSpec) -> ModelSpec:
    return replace(model, sequence_length=_NO_BOUND)
