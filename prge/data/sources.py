"""Reads the rows that a user names: files, a folder with a file for each part, or a data set of the hub.

Several files, such as the shards of a data set, are read one after another. A folder holds the files `train`,
`valid` and `test`, as for MLX; a JSON file may hold lists with these names instead. A data set has its name
on Hugging Face's hub, with a configuration after a colon: `nyu-mll/glue:sst2`. A path that exists is always
read as a path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prge.cli.field_types import Paths
from prge.cli.hints import closest_match
from prge.data.columns import format_column_names, present_columns
from prge.data.forms.feedback_rows import rows_from_feedback
from prge.data.forms.form import FORMS
from prge.data.forms.task import Task
from prge.data.readers.feedback import find_feedback_problem, is_feedback
from prge.data.readers.files import (
    ALL_PART_NAMES,
    FORMATS,
    JSON,
    LINES,
    PART_NAMES,
    Row,
    RowNumber,
    json_fields,
    read_rows,
    read_text,
    table_value,
    without_nulls,
)
from prge.data.readers.files import Part as Part
from prge.data.readers.json_rows import lists_of_parts
from prge.errors import ConfigError, DataError, format_value
from prge.formats.bundle import file_sha256
from prge.formats.documents import DocumentError, parse_json
from prge.objectives.preferences import ObjectiveName
from prge.system.packages import install_extra_command

# Columns that hold a list, or its JSON as a text in formats without lists, such as csv.
_LISTS = ("messages", "conversations")
# Pairs of columns that are both texts or both messages.
_PAIRED_COLUMNS = (("chosen", "rejected"), ("prompt", "completion"))
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?", re.ASCII)
# Timeout of the request that checks whether the hub is reachable.
_SECONDS = 5.0


@dataclass(frozen=True)
class RowSource:
    """Rows with their origin.

    Attributes:
        name: name of the source for users.
        rows: the rows.
        sha256: hash of the content.
        renamed: the file's names of renamed columns.
        feedback_summary: summary of the conversion of feedback; empty for other rows.
    """

    name: str
    rows: list[Row]
    sha256: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    feedback_summary: str = ""


def read_source(
    where: Paths | str,
    part: Part = "train",
    columns: Sequence[str] = (),
    broken: list[str] | None = None,
    objective: ObjectiveName = "completion",
    task: Task | None = None,
) -> RowSource:
    """Read the rows that a user names, and convert feedback to rows for training.

    Args:
        where: A file, a folder, or the name of a data set; or several files or folders.
        part: which file of a folder, list of a JSON file, or split of a data set to read.
        columns: words such as `prompt=question`, which rename the file's column `question` to `prompt`.
        broken: as for `read_rows`.
        objective: objective of the training, for the conversion of feedback.
        task: task whose columns are read; None if the form follows from the columns.

    Raises:
        ConfigError: `columns` is malformed, or names columns that are not read.
        DataError: there are no such rows or columns, or they can't be read, for example without a network.
    """
    renamed = parse_columns(columns)
    paths = find_row_files(where, part)
    source = _read_files(paths, part, broken) if paths else _read_hub(str(where), part)
    _check_renamed(renamed, task, source)
    if renamed:
        present = present_columns(source.rows)
        if lacking := [column for column in renamed.values() if column not in present]:
            raise DataError(
                f"{source.name} can't be used:",
                [
                    f"no row has the column {format_value(column)}, which --columns names"
                    for column in lacking
                ],
                remedy=f"Its columns are {format_column_names(present)}.",
                code="column-missing",
            )
        rows = [Row(row.number, _renamed(row.fields, renamed)) for row in source.rows]
        source = replace(source, rows=rows, renamed=renamed)
    if task is None:
        source = _parse_lists(source, broken)
    return source if renamed else _convert_feedback(source, broken, objective)


def describe_paths(where: Paths) -> str:
    """Format the names of rows for users."""
    paths = list_paths(where)
    if len(paths) < 3:
        return " and ".join(map(str, paths))
    return f"{paths[0]} and {len(paths) - 1} other files"


def list_paths(where: Paths | str) -> list[Path]:
    """Return the paths that a user named as rows as a list."""
    return list(map(Path, where)) if isinstance(where, tuple) else [Path(where)]


def find_row_files(where: Paths | str, part: Part) -> list[Path]:
    """Return the files with the rows that a user names; empty for a data set of the hub.

    Raises:
        DataError: A folder has no file of the part, or one of several named files doesn't exist.
    """
    paths = list_paths(where)
    if len(paths) == 1:
        path = find_row_file(paths[0], part)
        return [] if path is None else [path]
    what = f"{len(paths)} words are given as files of rows:"
    if missing := [path for path in paths if not os.path.exists(path)]:
        joined = " ".join(map(str, paths))
        remedy = "Quote a path that has spaces." if os.path.exists(joined) else "Check the paths."
        raise DataError(what, [f"there is no {path}" for path in missing], remedy=remedy, code="file-missing")
    if twice := sorted({str(path) for path in paths if paths.count(path) > 1}):
        raise DataError(
            what,
            [f"{path} is given twice" for path in twice],
            remedy="Give each file once.",
            code="file-twice",
        )
    return [find_part_file(path, part) if path.is_dir() else path for path in paths]


def _read_files(paths: Sequence[Path], part: Part, broken: list[str] | None) -> RowSource:
    """Read the rows of files in order; with several files, row numbers and problems name the file.

    Raises:
        DataError: as `read_rows`; the problems of all files are reported at once.
    """
    if len(paths) == 1:
        return RowSource(str(paths[0]), read_rows(paths[0], broken, part), file_sha256(paths[0]))
    name, rows, problems, first = describe_paths(tuple(paths)), [], [], 0
    digest = hashlib.sha256()
    for path in paths:
        of_file: list[str] = []
        read = read_rows(path, of_file, part)
        problems += [f"{path}: {problem}" for problem in of_file]
        rows += [Row(RowNumber(first + row.number, row.number, str(path)), row.fields) for row in read]
        first += read[-1].number
        digest.update(bytes.fromhex(file_sha256(path)))
    if broken is not None:
        broken += problems
    elif problems:
        raise DataError(
            f"{name} have rows that can't be read:",
            problems,
            remedy="Correct or remove these rows.",
            code="rows-unreadable",
        )
    return RowSource(name, rows, digest.hexdigest())


def _check_renamed(renamed: Mapping[str, str], task: Task | None, source: RowSource) -> None:
    """Raise ConfigError if `--columns` renames a column to a name that isn't read."""
    if task is not None:
        read = list(dict.fromkeys([*task.needed_columns(), *task.needed_columns(encoder=True)]))
        reader = f"the task {task.name}"
    else:
        read = list(dict.fromkeys(name for form in FORMS for name in (*form.columns, *form.optional)))
        reader = "prge"
    problems = []
    for name, column in renamed.items():
        if name in read:
            continue
        similar = closest_match(name, read, 0.6)
        hint = f"; did you mean {similar}={column}?" if similar else ""
        if column in read and name in present_columns(source.rows):
            hint = f"; did you mean {column}={name}?"
        problems.append(f"{format_value(name)} is not a column that {reader} reads{hint}")
    if problems:
        raise ConfigError(
            "--columns can't be used:",
            problems,
            remedy=f"Before the = stands one of {', '.join(read)}; after it, the name that the file has.",
            code="columns-unusable",
        )


def _parse_lists(source: RowSource, broken: list[str] | None) -> RowSource:
    """Return the rows with JSON lists in columns parsed; raises DataError as `read_rows`."""
    problems: list[str] = [] if broken is None else broken
    rows = []
    for row in source.rows:
        fields = _with_parsed_lists(row.fields)
        texts = [name for name in _LISTS if isinstance(fields.get(name), str)]
        if texts and not {*_PAIRED_COLUMNS[0]} <= fields.keys():
            problems.append(
                f"row {row.number}: its {texts[0]} is {format_value(fields[texts[0]])}, which is neither a "
                "list nor the JSON of one: write it with json.dumps, or the rows as jsonl"
            )
        else:
            rows.append(Row(row.number, fields))
    if (problems and broken is None) or not rows:
        raise DataError(
            f"{source.name} has rows that can't be read:",
            problems,
            remedy="Correct or remove these rows.",
            code="rows-unreadable",
        )
    return replace(source, rows=rows)


def _with_parsed_lists(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with the JSON lists in its columns parsed.

    Some columns are always lists. Others may be texts or messages: they are messages if all columns of a pair
    are the JSON of messages.
    """
    lists = {name: items for name in _LISTS if (items := _parse_list(fields.get(name))) is not None}
    for names in _PAIRED_COLUMNS:
        messages = {name: _parse_messages(fields.get(name)) for name in names}
        if all(messages.values()):
            lists |= {name: items for name, items in messages.items() if items is not None}
    if "chosen" in lists and (prompt := _parse_messages(fields.get("prompt"))):
        lists["prompt"] = prompt
    return {**fields, **lists} if lists else fields


def _parse_list(value: object) -> list[Any] | None:
    """Parse a JSON list; return None for any other value."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    try:
        items = parse_json(value)
    except DocumentError:
        return None
    return items if isinstance(items, list) else None


def _parse_messages(value: object) -> list[Any] | None:
    items = _parse_list(value)
    return items if items and all(isinstance(each, dict) and "role" in each for each in items) else None


def _convert_feedback(source: RowSource, broken: list[str] | None, objective: ObjectiveName) -> RowSource:
    """Convert feedback to rows for training; other rows are unchanged. Raises DataError as `read_rows`."""
    rows = [row for row in source.rows if is_feedback(row.fields)]
    if not rows:
        return source
    what = f"{source.name} can't be used:"
    if len(rows) < len(source.rows):
        raise DataError(
            what, ["it mixes feedback with other rows"], remedy="Make a file of each.", code="forms-mixed"
        )
    row_problems = {row.number: find_feedback_problem(row.fields) for row in rows}
    problems: list[str] = [] if broken is None else broken
    problems += [f"row {number}: {problem}" for number, problem in row_problems.items() if problem]
    converted, summary = rows_from_feedback([row for row in rows if not row_problems[row.number]], objective)
    if (problems and broken is None) or not converted:
        raise DataError(
            what,
            problems or [f"no row is left to train on: {summary}"],
            remedy="Correct them.",
            code="feedback-unsound" if problems else "rows-empty",
        )
    return replace(source, rows=converted, feedback_summary=summary)


def find_row_file(where: Path | str, part: Part) -> Path | None:
    """Return the file with the rows that a user names; None for a data set of the hub.

    Raises:
        DataError: A folder has no such file, or several.
    """
    path = Path(where)
    if path.is_dir():
        return find_part_file(path, part)
    return None if is_hub_name(path) else path


def find_part_file(folder: Path, part: Part) -> Path:
    """Return the file of a folder with a part's rows; raises DataError if there is none, or several."""
    files = list_part_files(folder, part)
    if len(files) == 1:
        return files[0]
    names = " or ".join(PART_NAMES[part])
    problem = f"it has {', '.join(path.name for path in files)}" if files else "it has none"
    raise DataError(
        f"{folder} must have one file of {part} rows, {names} with one of {', '.join(FORMATS)}:",
        [problem],
        remedy="Name the file itself.",
        code="part-missing",
    )


def list_part_files(folder: Path, part: Part) -> list[Path]:
    """Return the files of a folder that may hold a part's rows; empty if it isn't a folder."""
    candidates = [folder / f"{name}{suffix}" for name in PART_NAMES[part] for suffix in FORMATS]
    return [path for path in candidates if path.is_file()]


def sources_with_part(where: Paths, part: Part) -> Paths | None:
    """Return those of the named sources that hold a part: folders with its file, JSON files with its list.

    Returns None if there is none.
    """
    holding = tuple(
        path for path in list_paths(where) if list_part_files(path, part) or _has_list(path, part)
    )
    return holding if len(holding) > 1 else next(iter(holding), None)


def _has_list(path: Path, part: Part) -> bool:
    """Return whether a JSON file has lists of several parts, including this one."""
    if path.suffix.lower() not in (JSON, *LINES) or not path.is_file():
        return False
    lists = lists_of_parts(read_text(path), ALL_PART_NAMES)
    return len(lists) > 1 and any(name in lists for name in PART_NAMES[part])


def is_hub_name(path: Path) -> bool:
    """Return whether a path doesn't exist and may be the name of a data set of the hub."""
    return (
        not path.exists()
        and path.suffix.lower() not in FORMATS
        and _HUB_NAME.fullmatch(path.as_posix()) is not None
    )


def hub_names(settings: object, names: Iterable[str]) -> list[str]:
    """Return those of the given settings that name a data set of the hub instead of paths."""
    paths = ((name, getattr(settings, name, None)) for name in names)
    return [name for name, path in paths if isinstance(path, Path) and is_hub_name(path)]


def parse_columns(words: Sequence[str]) -> dict[str, str]:
    """Parse words such as `prompt=question` to new and old names of columns; raises ConfigError."""
    pairs = [word.partition("=") for word in words]
    problems = [
        f"{format_value(word)} is not a pair of columns"
        for word, (name, _, column) in zip(words, pairs, strict=True)
        if not name or not column
    ]
    for which, names in (("name", [pair[0] for pair in pairs]), ("column", [pair[2] for pair in pairs])):
        problems += [
            f"{format_value(each)} is a {which} twice" for each in sorted({*names}) if names.count(each) > 1
        ]
    if problems:
        raise ConfigError(
            "--columns can't be used:",
            problems,
            remedy="Give --columns prompt=question completion=answer.",
            code="columns-unusable",
        )
    return {name: column for name, _, column in pairs}


def _renamed(fields: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Rename the columns of a row; a column that already had one of the new names is left out."""
    moved = {name: fields[column] for name, column in renamed.items() if column in fields}
    rest = {
        column: value
        for column, value in fields.items()
        if column not in renamed and column not in renamed.values()
    }
    return {**moved, **rest}


def _read_hub(name: str, part: Part) -> RowSource:
    what = f"{name} can't be read as data:"
    try:
        import datasets
        from huggingface_hub import HfApi, constants
    except ImportError:
        raise DataError(
            what,
            [
                "there is no such file or folder, and for a data set of the hub the package datasets is "
                "not installed"
            ],
            remedy=f"Check the path, or {install_extra_command('data')}.",
            code="package-missing",
        ) from None
    repository, _, configuration = name.partition(":")
    try:
        if not constants.HF_HUB_OFFLINE:
            # A single request, since the library itself would retry many times.
            HfApi().dataset_info(repository, timeout=_SECONDS)
        once = datasets.DownloadConfig(max_retries=0)
        splits = datasets.get_dataset_split_names(repository, configuration or None, download_config=once)
        split = next((each for each in PART_NAMES[part] if each in splits), None)
        if split is None:
            raise DataError(
                what,
                [f"it has no {part} rows: its splits are {', '.join(splits)}"],
                remedy="Name a file.",
                code="part-missing",
            )
        loaded = datasets.load_dataset(repository, configuration or None, split=split, download_config=once)
        rows = [
            Row(number, without_nulls(table_value(dict(fields)))) for number, fields in enumerate(loaded, 1)
        ]
    except DataError:
        raise
    except Exception as error:  # the library raises exceptions of many packages
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DataError(
            what,
            [
                "there is no such file or folder, and the data set could not be loaded: "
                f"{type(error).__name__}: {reason}"
            ],
            remedy="Check name and connection; HF_HUB_OFFLINE=1 uses a data set that was loaded before.",
            code="data-set-missing",
        ) from None
    content = json.dumps([json_fields(row.fields) for row in rows], sort_keys=True).encode()
    return RowSource(f"{name} ({split})", rows, hashlib.sha256(content).hexdigest())
