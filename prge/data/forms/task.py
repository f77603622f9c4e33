"""Task files, which define how a row of a data set becomes a prompt, candidate answers and a label.

A task file is YAML with the keys of `Task`. Templates may contain column names and the filters below, such as
`{question|strip|capitalize}`. They can't access attributes or items, so an untrusted file reaches only the
columns of a row. The prompts of the included tasks are like MeZO's (arXiv 2305.17333), in our own wording.
"""

from __future__ import annotations

import difflib
import math
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from prge.cli.bounds import BOUNDS
from prge.data.columns import RowError
from prge.errors import ConfigError, format_value
from prge.formats.documents import DocumentError, read_yaml

TASKS = Path(__file__).parent / "tasks"
# Metrics that compare a text with each of a row's answers and take the best result.
TEXT_METRICS = ("f1_answer", "exact_match", "rouge_l")
METRICS = ("accuracy", "f1", *TEXT_METRICS)
OBJECTIVES = ("candidates", "completion")
COLUMNS = ("label", "answers")
PLACEHOLDER = "@placeholder"
CANDIDATE = "candidate"
FIELD = re.compile(r"[^\W\d][\w -]*(\|[a-z_]+)*")

FILTERS: dict[str, Callable[[str], str]] = {
    "strip": str.strip,
    "lower": str.lower,
    "capitalize": lambda text: text[:1].upper() + text[1:],
    "lower_first": lambda text: text[:1].lower() + text[1:],
    "unpunctuated": lambda text: text.rstrip().rstrip(".!?,;:").rstrip(),
    "one_line": lambda text: " ".join(text.split()),
    "spaces": lambda text: text.replace("_", " "),
    "without_highlights": lambda text: text.replace("@highlight\n", ""),
    "before_placeholder": lambda text: text.partition(PLACEHOLDER)[0].rstrip(),
    "after_placeholder": lambda text: text.partition(PLACEHOLDER)[2].rstrip(),
}


@dataclass(frozen=True)
class Field:
    """One `{column|filter|...}` of a template."""

    column: str
    filters: tuple[str, ...]


@dataclass(frozen=True)
class Template:
    """A parsed template: literal texts and fields in order."""

    source: str
    parts: tuple[str | Field, ...]

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, source: str) -> Template:
        """Parse a template; raises ValueError if it is invalid."""
        parts: list[str | Field] = []
        try:
            fields_and_texts = list(string.Formatter().parse(source))
        except ValueError as error:
            raise ValueError(f"{error} (write {{{{ and }}}} for braces)") from None
        for literal, name, layout, conversion in fields_and_texts:
            if literal:
                parts.append(literal)
            if name is None:
                continue
            if layout or conversion or not FIELD.fullmatch(name):
                raise ValueError(f"{{{name}}} must be a column name, optionally with filters after |")
            column, *filters = name.split("|")
            unknown = [each for each in filters if each not in FILTERS]
            if unknown:
                raise ValueError(
                    f"{{{name}}} has the unknown filter {unknown[0]!r}; known are {', '.join(FILTERS)}"
                )
            parts.append(Field(column, tuple(filters)))
        return cls(source, tuple(parts))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the template reads, in order and without duplicates."""
        return tuple(dict.fromkeys(part.column for part in self.parts if isinstance(part, Field)))

    def render(self, row: Mapping[str, Any], values: Mapping[str, Mapping[str, str]] | None = None) -> str:
        """Render the template for a row, after replacing values of columns by `values`. Raises RowError."""
        texts = []
        for part in self.parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            text = _text(row, part.column)
            replacements = (values or {}).get(part.column)
            if replacements is not None:
                if text not in replacements:
                    raise RowError(
                        f"column {part.column!r} is {format_value(text)}, must be one of "
                        f"{', '.join(replacements)}",
                        code="value-unknown",
                    )
                text = replacements[text]
            for name in part.filters:
                text = FILTERS[name](text)
            texts.append(text)
        return "".join(texts)


@dataclass(frozen=True)
class Generate:
    """How a model generates an answer: at most `max_tokens` tokens, up to the first of the texts in `stop`.

    The defaults are MeZO's (arXiv 2305.17333): 50 tokens, up to a line break.
    """

    max_tokens: int = 50
    stop: tuple[str, ...] = ("\n",)


@dataclass(frozen=True)
class Task:
    """A task, defined by one of label_words, choices and choices_column, or by columns.answers alone."""

    name: str
    """Name in reports."""
    template: str
    """The prompt: text with {column} or {column|filter}."""
    text: str = ""
    """Text for an encoder, without the words that lead to an answer; default: `template`."""
    candidate: str = "{candidate}"
    """Format of a candidate after the prompt; may use columns, too."""
    label_words: Mapping[str, str] = field(default_factory=dict)
    """Mapping of label values to their words."""
    choices: tuple[str, ...] = ()
    """Columns that hold the candidates of a row."""
    choices_column: str = ""
    """The column that holds a list of candidates."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns of the data: `label` (default: label), `answers`."""
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Mapping of columns to {value: text}, which replaces values."""
    metric: str = "accuracy"
    """accuracy, f1 (macro), or of texts: f1_answer and exact_match (SQuAD's two), rouge_l."""
    objective: str = "candidates"
    """Training loss: cross-entropy over `candidates`, or of the correct candidate as a `completion`."""
    separator: str = " "
    """Text between prompt and candidate, unless one of them has white space there."""
    generate: Generate | None = None
    """How the model generates answers in an evaluation; None to compare candidates."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name in ("name", "template"):
            if not getattr(self, name):
                problems.append(f"{name} is missing")
        candidate_sources = [
            name for name in ("label_words", "choices", "choices_column") if getattr(self, name)
        ]
        if len(candidate_sources) > 1:
            problems.append(f"{' and '.join(candidate_sources)} exclude each other")
        if not candidate_sources and "answers" not in self.columns:
            problems.append("one of label_words, choices, choices_column or columns.answers is needed")
        if len(self.label_words) == 1 or len(self.choices) == 1:
            problems.append("at least two candidates are needed")
        if any(not word.strip() for word in self.label_words.values()):
            problems.append("label_words has an empty word")
        words = [word.strip() for word in self.label_words.values()]
        if len(set(words)) < len(words):
            problems.append(f"label_words has a word twice: {', '.join(words)}")
        for name, choices in (("metric", METRICS), ("objective", OBJECTIVES)):
            if getattr(self, name) not in choices:
                problems.append(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(choices)}")
        if self.metric in TEXT_METRICS and "answers" not in self.columns:
            problems.append(f"metric {self.metric} needs columns.answers")
        if self.generate and (candidate_sources or "answers" not in self.columns):
            problems.append("generate is for tasks with columns.answers alone")
        if self.generate and self.metric not in TEXT_METRICS:
            problems.append(f"generate needs one of the metrics {', '.join(TEXT_METRICS)}")
        if self.metric == "f1" and not self.label_words:
            problems.append("metric f1 needs label_words: it is a mean over classes")
        unknown = sorted(set(self.columns) - set(COLUMNS))
        if unknown:
            problems.append(f"columns has unknown keys: {', '.join(unknown)}; known are {', '.join(COLUMNS)}")
        for name in ("template", "text", "candidate"):
            try:
                template = Template.parse(getattr(self, name))
            except ValueError as error:
                problems.append(f"{name}: {error}")
            else:
                if name == CANDIDATE and CANDIDATE not in template.columns:
                    problems.append("candidate: must contain {candidate}")
        if problems:
            raise ConfigError(
                f"The task {self.name or '(without a name)'} can't be used:", problems, code="task-unusable"
            )

    @property
    def is_completion(self) -> bool:
        """Whether rows have answers and no candidates."""
        return not (self.label_words or self.choices or self.choices_column)

    @property
    def classes(self) -> tuple[str, ...]:
        """Label values in order; empty if candidates differ from row to row."""
        return tuple(self.label_words)

    def needed_columns(self, encoder: bool = False) -> tuple[str, ...]:
        """Return the columns that every row must have."""
        needed = [*Template.parse((self.text if encoder else "") or self.template).columns]
        if not encoder:
            needed += [name for name in Template.parse(self.candidate).columns if name != CANDIDATE]
        needed += [*self.choices, *([self.choices_column] if self.choices_column else [])]
        if "answers" in self.columns:
            needed.append(self.columns["answers"])
        if not self.is_completion and not ("answers" in self.columns and "label" not in self.columns):
            needed.append(self.label_column)
        return tuple(dict.fromkeys(needed))

    @property
    def label_column(self) -> str:
        """The column that holds the label."""
        return self.columns.get("label", "label")

    def prompt(self, row: Mapping[str, Any]) -> str:
        """Return the prompt of a row. Raises RowError."""
        return Template.parse(self.template).render(row, self.values)

    def encoder_text(self, row: Mapping[str, Any]) -> str:
        """Return the text of a row for an encoder. Raises RowError."""
        return Template.parse(self.text or self.template).render(row, self.values)

    def candidates(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the candidate texts of a row, as they are compared with answers. Raises RowError."""
        if self.label_words:
            return tuple(self.label_words.values())
        if self.choices:
            return tuple(_text(row, column) for column in self.choices)
        listed = _column(row, self.choices_column)
        if not isinstance(listed, list) or not all(isinstance(text, str) and text.strip() for text in listed):
            raise RowError(f"column {self.choices_column!r} must be a list of texts", code="column-not-texts")
        distinct = tuple(dict.fromkeys(listed))
        if len(distinct) < 2:
            raise RowError(
                f"column {self.choices_column!r} has {len(distinct)} candidates, needs at least two",
                code="candidates-too-few",
            )
        return distinct

    def answers(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the gold texts of a row: a text, a list, SQuAD's {text: [...]} or DROP's {spans: [...]}."""
        column = self.columns.get("answers")
        if column is None:
            return ()
        value = _column(row, column)
        if isinstance(value, dict):
            value = value.get("text", value.get("spans"))
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise RowError(
                f"column {column!r} must be a text or a list of texts, or have one under text or spans",
                code="column-not-texts",
            )
        answers = tuple(dict.fromkeys(text for text in value if text.strip()))
        if not answers:
            raise RowError(
                f"column {column!r} has no answer: there is nothing to learn from", code="answer-empty"
            )
        return answers

    def label(self, row: Mapping[str, Any]) -> int:
        """Return the index of the correct candidate of a row. Raises RowError."""
        if "answers" in self.columns and "label" not in self.columns:
            candidates, answers = self.candidates(row), self.answers(row)
            for answer in answers:
                if answer in candidates:
                    return candidates.index(answer)
            raise RowError(
                f"no answer is among the candidates: {', '.join(answers)}", code="answer-not-a-candidate"
            )
        value = _column(row, self.label_column)
        if self.label_words:
            keys = list(self.label_words)
        else:
            keys = [str(index) for index in range(len(self.candidates(row)))]
            if value in self.choices:
                return self.choices.index(value)
        # True in a csv file and true in JSON both stand for the key true, or 1. pandas writes 1 as 1.0 in a
        # column with missing values.
        is_whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
        for spelling in (_key(value), _key(value).lower(), str(int(value)) if is_whole else ""):
            if spelling in keys:
                return keys.index(spelling)
        raise RowError(
            f"column {self.label_column!r} is {format_value(value)}, must be one of {', '.join(keys)}",
            code="label-unknown",
        )

    def candidate_text(self, prompt: str, candidate: str, row: Mapping[str, Any]) -> str:
        """Return a candidate as it follows the prompt, separator included. Raises RowError."""
        text = Template.parse(self.candidate).render({**row, CANDIDATE: candidate}, self.values)
        return self.join(prompt, text)

    def join(self, prompt: str, text: str) -> str:
        """Prepend the separator to a text, unless the text or the prompt already has white space there."""
        return text if text[:1].isspace() or prompt[-1:].isspace() or not prompt else self.separator + text


def task_names() -> tuple[str, ...]:
    """Return the names of the tasks that come with the package."""
    return tuple(sorted(path.stem for path in TASKS.glob("*.yaml")))


def load_task(name_or_path: str | Path) -> Task:
    """Load a task by its name, or from a YAML file.

    Raises:
        ConfigError: there is no such task or file, it is not YAML, or it has invalid keys or values, all of
            which the error lists.
    """
    path = Path(name_or_path)
    if isinstance(name_or_path, str) and name_or_path in task_names():
        path = TASKS / f"{name_or_path}.yaml"
    if not path.is_file():
        close = difflib.get_close_matches(str(name_or_path), task_names(), 1)
        raise ConfigError(
            f"There is no task or task file {str(name_or_path)!r}:",
            [f"did you mean {close[0]}?"] if close else [],
            remedy=f"Give a path to a YAML file, or one of {', '.join(task_names())}.",
            code="task-unknown",
        )
    try:
        content = read_yaml(path)
    except DocumentError as error:
        raise ConfigError(f"{path} can't be read as a task:", [str(error)], code="task-unreadable") from None
    return parse_task(content, str(path))


def parse_task(content: object, source: str) -> Task:
    """Create a task from parsed YAML; `source` names it in errors. Raises ConfigError with all problems."""
    if not isinstance(content, dict):
        raise ConfigError(
            f"{source} is not a task file:", ["it must hold keys and values"], code="task-unreadable"
        )
    names = [each.name for each in fields(Task)]
    problems = []
    for key in content:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, 1)
            problems.append(
                f"unknown key {format_value(key)}" + (f", did you mean {close[0]}?" if close else "")
            )
    arguments: dict[str, Any] = {}
    for key in names:
        if content.get(key) is None:
            continue
        value = content[key]
        if key in ("label_words", "columns"):
            arguments[key] = _texts(value, key, problems)
        elif key == "values":
            if isinstance(value, dict):
                arguments[key] = {
                    str(name): _texts(each, f"{key}.{name}", problems) for name, each in value.items()
                }
            else:
                problems.append(f"{key} is {format_value(value)}, must be column: {{value: text}}")
        elif key == "choices":
            if isinstance(value, list) and all(isinstance(each, str) for each in value):
                arguments[key] = tuple(value)
            else:
                problems.append(f"{key} is {format_value(value)}, must be a list of columns")
        elif key == "generate":
            arguments[key] = _generate(value, problems)
        elif isinstance(value, str):
            arguments[key] = value
        else:
            problems.append(f"{key} is {format_value(value)}, must be a text")
    remedy = f"Known keys: {', '.join(names)}."
    try:
        task = Task(**{"name": "", "template": "", **arguments})
    except ConfigError as error:
        reported = {problem.split()[0].rstrip(":") for problem in problems}
        problems += [problem for problem in error.problems if problem.split()[0].rstrip(":") not in reported]
    if problems:
        raise ConfigError(f"{source} can't be used as a task:", problems, remedy=remedy, code="task-unusable")
    return task


def _generate(value: object, problems: list[str]) -> Generate:
    known = [each.name for each in fields(Generate)]
    if not isinstance(value, dict) or any(name not in known for name in value):
        problems.append(f"generate is {format_value(value)}, must have max_tokens, stop or both")
        return Generate()
    most, stop = value.get("max_tokens", Generate.max_tokens), value.get("stop", list(Generate.stop))
    if type(most) is not int or (problem := BOUNDS["max_tokens"].problem(most)):
        problem_text = problem if type(most) is int else "must be a whole number"
        problems.append(f"generate.max_tokens is {format_value(most)}, {problem_text}")
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        problems.append(f"generate.stop is {format_value(stop)}, must be a list of texts")
        stop = []
    return Generate(most, tuple(stop))


def _texts(value: object, key: str, problems: list[str]) -> dict[str, str]:
    if not isinstance(value, dict):
        problems.append(f"{key} is {format_value(value)}, must be keys and texts")
        return {}
    for name, text in value.items():
        if isinstance(text, bool):
            problems.append(
                f"{key} {name} is {text}: put it in quotes (YAML takes bare Yes and No for true and false)"
            )
        elif not isinstance(text, (str, int, float)):
            problems.append(f"{key} {name} is {format_value(text)}, must be a text")
    return {_key(name): str(text) for name, text in value.items()}


def _key(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def _column(row: Mapping[str, Any], column: str) -> Any:
    if row.get(column) is None:
        problem = "empty" if column in row else "missing"
        raise RowError(f"column {column!r} is {problem}", code=f"column-{problem}")
    return row[column]


def _text(row: Mapping[str, Any], column: str) -> str:
    value = _column(row, column)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    raise RowError(f"column {column!r} is a {type(value).__name__}, must be a text", code="column-not-text")
