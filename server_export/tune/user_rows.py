"""Read and check the rows that a user names, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prge.cli.field_types import Paths
from prge.data.example_building import build_examples
from prge.data.forms.form import Form, find_form
from prge.data.forms.task import load_task
from prge.data.options import BuildOptions, Overflow
from prge.data.readers.files import Row, Selection, select_rows
from prge.data.readers.splitting import split_rows
from prge.data.row_report import DataReport
from prge.data.sources import Part, RowSource, read_source, sources_with_part
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import DataError
from prge.model_spec import ModelSpec
from prge.objectives.examples import Example
from prge.objectives.preferences import make_objective
from server_export.tune.settings import TuneSettings

# More tokens than any row has, so that no row is truncated while lengths are measured.
_NO_BOUND = 1 << 24
_SHOWN_ROWS = 5


class UserRows:
    """Training rows, and development and test rows if the user names them or a folder has them.

    Args:
        settings: settings of the tuning.

    Attributes:
        notes: lines to print for the user.

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
        self._sources: dict[Part, RowSource] = {}
        for part, paths in named.items():
            sources = sources_with_part(settings.data, part) if paths is None else paths
            if sources is not None:
                self._sources[part] = source = self._read(sources, part)
                prefix = "" if part == "train" else f"{part}: "
                self.notes.append(f"{prefix}{len(source.rows):,} rows from {source.name}")
                self.notes += filter(None, [source.feedback_summary])

    @property
    def chat(self) -> str:
        """How rows use a chat template: `needs`, `takes` if there is one, or "" for neither."""
        return "" if self._task else self._form(self._sources["train"]).chat

    @property
    def is_generative(self) -> bool:
        """Whether the model learns to generate text, and not to choose among candidates."""
        return self._task is None or self._task.generate is not None

    def sample_examples(self, count: int, tokenizer: Tokenizer, model: ModelSpec) -> list[Example]:
        """Return examples of `count` randomly chosen training rows, as a run of the model uses them."""
        rows = select_rows(self._sources["train"].rows, Selection(limit=count, shuffle_seed=0))
        examples, _ = self._build(
            "train",
            rows,
            tokenizer,
            _unbounded(model),
            self._options("auto"),
        )
        return examples

    def check(self, tokenizer: Tokenizer, model: ModelSpec) -> int:
        """Leave out unusable rows, and return the number of tokens of the longest training row.

        Raises:
            DataError: there are unusable rows, and `on_bad_row` is `stop`; the error lists all of them.
            ConfigError: settings belong to another objective than that of the rows.
        """
        longest = 0
        problems: dict[str, list[str]] = {}
        for part, source in self._sources.items():
            options = self._options("auto", skip_unusable=True)
            examples, report = self._build(part, source.rows, tokenizer, _unbounded(model), options)
            unusable = [
                *self._broken.pop(part, ()),
                *(f"row {row}: {why}" for row, why in report.unusable.items()),
            ]
            if unusable:
                problems[source.name] = unusable
                count = "1 row" if len(unusable) == 1 else f"{len(unusable)} rows"
                self.notes.append(f"left out {count} of {source.name}:")
                self.notes += [f"  {problem}" for problem in unusable[:_SHOWN_ROWS]]
                self.notes += [f"  ... and {len(unusable) - _SHOWN_ROWS} more"] * (
                    len(unusable) > _SHOWN_ROWS
                )
                usable = [row for row in source.rows if row.number not in report.unusable]
                self._sources[part] = replace(source, rows=usable)
            if part == "train":
                make_objective(report.objective, self._settings)
                longest = max(report.lengths)
                self._classes = {each.row: each for each in examples} if model.is_encoder else {}
        if problems and self._settings.on_bad_row == "stop":
            several = len(problems) > 1
            raise DataError(
                f"{' and '.join(problems)} {'have' if several else 'has'} rows that can't be used:",
                [
                    f"{name}: {problem}" if several else problem
                    for name, unusable in problems.items()
                    for problem in unusable
                ],
                remedy="Correct or remove them, or leave them out with --on-bad-row skip.",
                code="rows-unusable",
            )
        return longest

    def split(self, tokenizer: Tokenizer, model: ModelSpec) -> dict[Part, list[Row]]:
        """Return the rows of all parts; development rows are split off if the user names none.

        Args:
            tokenizer: tokenizer of the bundle.
            model: model of the bundle; rows that are too long for it are noted.

        Raises:
            DataError: more target tokens would be left out than the settings allow, or a class of an encoder
                has no training row.
        """
        settings = self._settings
        options = self._options(settings.overflow, max_dropped=settings.max_dropped)
        for part, source in self._sources.items():
            _, report = self._build(part, source.rows, tokenizer, model, options)
            self.notes.append(f"{source.name}: columns: {report.columns}")
            self.notes += [f"{source.name}: {event}" for event in report.events()]
            if not self._task:
                self._sources[part] = replace(source, rows=[_only(row, report.read) for row in source.rows])
        parts: dict[Part, list[Row]] = {part: source.rows for part, source in self._sources.items()}
        if "dev" not in parts:
            columns = self._task.needed_columns() if self._task else None
            split = split_rows(parts["train"], columns=columns)
            parts |= {"train": split.train, "dev": split.dev}
            self.notes += split.notes
        if model.is_encoder:
            self._check_classes([self._classes[row.number] for row in parts["train"]])
        return parts

    def _check_classes(self, examples: Sequence[Example]) -> None:
        """Raise DataError if a class has no training row, so that an encoder's head can't learn it."""
        lacking = set(range(examples[0].candidates)) - {example.label for example in examples}
        if lacking:
            name, words = self._sources["train"].name, examples[0].choices
            raise DataError(
                f"{name} can't be used:",
                [f"no training row is of the class {words[label].strip()!r}" for label in sorted(lacking)],
                remedy="Give rows of every class, at least two if development rows are split off.",
                code="class-without-rows",
            )

    def _read(self, sources: Paths, part: Part) -> RowSource:
        """Read the rows of a part."""
        broken = self._broken.setdefault(part, [])
        source = read_source(
            sources, part, self._settings.columns, broken, self._settings.objective, self._task
        )
        if not self._task:  # rows of no form are refused before anything else is done
            self._form(source)
        return source

    def _form(self, source: RowSource) -> Form:
        """Return the form of the rows of a part; raises DataError if they have none."""
        return find_form(source.rows, source.name, source.renamed, objective=self._settings.objective)

    def _options(self, overflow: Overflow, **more: Any) -> BuildOptions:
        """Return the options for building examples."""
        settings = self._settings
        return BuildOptions(
            overflow,
            settings.append_eos,
            objective=settings.objective,
            control_tokens=settings.control_tokens,
            date=settings.date,
            **more,
        )

    def _build(
        self,
        part: Part,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        model: ModelSpec,
        options: BuildOptions,
    ) -> tuple[list[Example], DataReport]:
        """Build examples of rows, and return them with a report."""
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
    """Return a row with these columns only."""
    return Row(row.number, {name: row.fields[name] for name in columns if name in row.fields})


def _unbounded(model: ModelSpec) -> ModelSpec:
    return replace(model, sequence_length=_NO_BOUND)
