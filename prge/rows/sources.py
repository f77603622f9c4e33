"""What a user names as rows: files, a folder with a file for each part, or a data set of Hugging Face's hub.

Several files are read one after another, such as the shards of a data set. A folder holds `train`, `valid`
and `test` as files, as for MLX; a JSON file may hold lists of these names instead. A data set is named as on
the hub, a configuration of it after a colon: `nyu-mll/glue:sst2`. A path that exists is never taken for one.
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

from prge.errors import ConfigError, DataError, shown
from prge.files.bundle import file_sha256
from prge.files.documents import DocumentError, parse_json
from prge.host.packages import install_extra
from prge.learning.preferences import ObjectiveName
from prge.rows.columns import column_names, present_columns
from prge.rows.forms.feedback_rows import rows_of_feedback
from prge.rows.forms.form import FORMS
from prge.rows.forms.task import Task
from prge.rows.readers.feedback import is_feedback, problem_of
from prge.rows.readers.files import (
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
from prge.rows.readers.files import Part as Part
from prge.rows.readers.json_rows import lists_of_parts
from prge.verbs.habits import nearest
from prge.verbs.kinds import Paths

# Columns that hold a list, or its JSON as a text where a file has no lists, as csv has none.
_LISTS = ("messages", "conversations")
# Columns that are both texts, or both messages.
_ALIKE = (("chosen", "rejected"), ("prompt", "completion"))
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?", re.ASCII)
# Of the one question that tells whether the hub answers.
_SECONDS = 5.0


@dataclass(frozen=True)
class Source:
    """Rows as they came: what to call them, what identifies them, and the file's names of renamed columns.

    `told` says what became of feedback.
    """

    name: str
    rows: list[Row]
    sha256: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    told: str = ""


def read_source(
    where: Paths | str,
    part: Part = "train",
    columns: Sequence[str] = (),
    broken: list[str] | None = None,
    objective: ObjectiveName = "completion",
    task: Task | None = None,
) -> Source:
    """Read the rows that a user names; feedback becomes rows to learn from.

    Args:
        where: a file, a folder, or the name of a data set; or several files or folders.
        part: which file of a folder, list of a JSON file, or split of a data set.
        columns: words such as `prompt=question`, which call the file's column `question` `prompt`.
        broken: as of `read_rows`.
        objective: what feedback is to become rows of.
        task: what says which columns are read; without one, the columns say what a row is.

    Raises:
        ConfigError: `columns` are no such words, or name columns that are not read.
        DataError: there are no such rows or columns, they can't be read, or not offline.
    """
    renamed = parse_columns(columns)
    paths = rows_files(where, part)
    source = _of_files(paths, part, broken) if paths else _of_hub(str(where), part)
    _check_names(renamed, task, source)
    if renamed:
        present = present_columns(source.rows)
        if lacking := [column for column in renamed.values() if column not in present]:
            raise DataError(
                f"{source.name} can't be used",
                [f"no row has the column {shown(column)}, which --columns names" for column in lacking],
                remedy=f"its columns are {column_names(present)}",
                code="column-missing",
            )
        rows = [Row(row.number, _renamed(row.fields, renamed)) for row in source.rows]
        source = replace(source, rows=rows, renamed=renamed)
    if task is None:
        source = _with_lists(source, broken)
    return source if renamed else _learnable(source, broken, objective)


def describe_paths(where: Paths) -> str:
    """What a user named as rows, for a person to read."""
    paths = paths_of(where)
    if len(paths) < 3:
        return " and ".join(map(str, paths))
    return f"{paths[0]} and {len(paths) - 1} other files"


def paths_of(where: Paths | str) -> list[Path]:
    """What a user named as rows, one or several, as a list."""
    return list(map(Path, where)) if isinstance(where, tuple) else [Path(where)]


def rows_files(where: Paths | str, part: Part) -> list[Path]:
    """The files that hold the rows that a user names; none for a data set of the hub.

    Raises:
        DataError: a folder has no file of the part, or several files are named of which one is not there.
    """
    paths = paths_of(where)
    if len(paths) == 1:
        path = rows_file(paths[0], part)
        return [] if path is None else [path]
    what = f"{len(paths)} words are given as files of rows"
    if missing := [path for path in paths if not os.path.exists(path)]:
        joined = " ".join(map(str, paths))
        remedy = "quote a path that has spaces" if os.path.exists(joined) else "check the paths"
        raise DataError(what, [f"there is no {path}" for path in missing], remedy=remedy, code="file-missing")
    if twice := sorted({str(path) for path in paths if paths.count(path) > 1}):
        raise DataError(
            what,
            [f"{path} is given twice" for path in twice],
            remedy="give each file once",
            code="file-twice",
        )
    return [file_of_part(path, part) if path.is_dir() else path for path in paths]


def _of_files(paths: Sequence[Path], part: Part, broken: list[str] | None) -> Source:
    """The rows of files, one after another; of several, every row's number and every problem names its file.

    Raises:
        DataError: as of `read_rows`; problems of all files are told at once.
    """
    if len(paths) == 1:
        return Source(str(paths[0]), read_rows(paths[0], broken, part), file_sha256(paths[0]))
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
            f"{name} have rows that can't be read",
            problems,
            remedy="correct or remove these rows",
            code="rows-unreadable",
        )
    return Source(name, rows, digest.hexdigest())


def _check_names(renamed: Mapping[str, str], task: Task | None, source: Source) -> None:
    """Raise ConfigError where `--columns` gives a column a name that nothing reads."""
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
        near = nearest(name, read, 0.6)
        hint = f"; did you mean {near}={column}?" if near else ""
        if column in read and name in present_columns(source.rows):
            hint = f"; did you mean {column}={name}?"
        problems.append(f"{shown(name)} is no column that {reader} reads{hint}")
    if problems:
        raise ConfigError(
            "--columns can't be used:",
            problems,
            remedy=f"before the = stands one of {', '.join(read)}; after it, the name that the file has",
            code="columns-unusable",
        )


def _with_lists(source: Source, broken: list[str] | None) -> Source:
    """The same rows with the lists that some columns hold as JSON; raises DataError as `read_rows`."""
    problems: list[str] = [] if broken is None else broken
    rows = []
    for row in source.rows:
        fields = _lists_read(row.fields)
        texts = [name for name in _LISTS if isinstance(fields.get(name), str)]
        if texts and not {*_ALIKE[0]} <= fields.keys():
            problems.append(
                f"row {row.number}: its {texts[0]} is {shown(fields[texts[0]])}, which is no list and "
                "not the JSON of one: write it with json.dumps, or the rows as jsonl"
            )
        else:
            rows.append(Row(row.number, fields))
    if (problems and broken is None) or not rows:
        raise DataError(
            f"{source.name} has rows that can't be read",
            problems,
            remedy="correct or remove these rows",
            code="rows-unreadable",
        )
    return replace(source, rows=rows)


def _lists_read(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with the lists that some of its columns hold as JSON.

    Some columns are always lists. Others may be texts or messages: they are messages where all that belong
    together are the JSON of messages.
    """
    lists = {name: items for name in _LISTS if (items := _list_of(fields.get(name))) is not None}
    for names in _ALIKE:
        messages = {name: _messages_of(fields.get(name)) for name in names}
        if all(messages.values()):
            lists |= {name: items for name, items in messages.items() if items is not None}
    if "chosen" in lists and (prompt := _messages_of(fields.get("prompt"))):
        lists["prompt"] = prompt
    return {**fields, **lists} if lists else fields


def _list_of(value: object) -> list[Any] | None:
    """The list that a text is the JSON of; None where it is none."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    try:
        items = parse_json(value)
    except DocumentError:
        return None
    return items if isinstance(items, list) else None


def _messages_of(value: object) -> list[Any] | None:
    items = _list_of(value)
    return items if items and all(isinstance(each, dict) and "role" in each for each in items) else None


def _learnable(source: Source, broken: list[str] | None, objective: ObjectiveName) -> Source:
    """The same rows, or those that feedback becomes; raises DataError as `read_rows`."""
    rows = [row for row in source.rows if is_feedback(row.fields)]
    if not rows:
        return source
    what = f"{source.name} can't be used"
    if len(rows) < len(source.rows):
        raise DataError(
            what, ["it mixes feedback with other rows"], remedy="make a file of each", code="forms-mixed"
        )
    found = {row.number: problem_of(row.fields) for row in rows}
    problems: list[str] = [] if broken is None else broken
    problems += [f"row {number}: {problem}" for number, problem in found.items() if problem]
    made, told = rows_of_feedback([row for row in rows if not found[row.number]], objective)
    if (problems and broken is None) or not made:
        raise DataError(
            what,
            problems or [f"no row is left to learn from: {told}"],
            remedy="correct them",
            code="feedback-unsound" if problems else "rows-empty",
        )
    return replace(source, rows=made, told=told)


def rows_file(where: Path | str, part: Part) -> Path | None:
    """The file that holds the rows that a user names; None for a data set of the hub.

    Raises:
        DataError: a folder has none, or several.
    """
    path = Path(where)
    if path.is_dir():
        return file_of_part(path, part)
    return None if is_hub_name(path) else path


def file_of_part(folder: Path, part: Part) -> Path:
    """The file of a folder that holds a part's rows; raises DataError where it has none, or several."""
    found = files_of_part(folder, part)
    if len(found) == 1:
        return found[0]
    names = " or ".join(PART_NAMES[part])
    problem = f"it has {', '.join(path.name for path in found)}" if found else "it has none"
    raise DataError(
        f"{folder} must have one file of {part} rows, {names} with one of {', '.join(FORMATS)}",
        [problem],
        remedy="name the file itself",
        code="part-missing",
    )


def files_of_part(folder: Path, part: Part) -> list[Path]:
    """The files of a folder that may hold a part's rows; none where it is no folder."""
    wanted = [folder / f"{name}{suffix}" for name in PART_NAMES[part] for suffix in FORMATS]
    return [path for path in wanted if path.is_file()]


def holding_part(where: Paths, part: Part) -> Paths | None:
    """What of the named rows holds a part of its own: folders with its file, JSON files with its list.

    None where there is nothing of the kind.
    """
    holding = tuple(path for path in paths_of(where) if files_of_part(path, part) or _has_list(path, part))
    return holding if len(holding) > 1 else next(iter(holding), None)


def _has_list(path: Path, part: Part) -> bool:
    """Whether a file of JSON has lists of several parts, of which this is one."""
    if path.suffix.lower() not in (JSON, *LINES) or not path.is_file():
        return False
    lists = lists_of_parts(read_text(path), ALL_PART_NAMES)
    return len(lists) > 1 and any(name in lists for name in PART_NAMES[part])


def is_hub_name(path: Path) -> bool:
    """Whether a path is none that exists and may name a data set of the hub."""
    return (
        not path.exists()
        and path.suffix.lower() not in FORMATS
        and _HUB_NAME.fullmatch(path.as_posix()) is not None
    )


def hub_names(settings: object, names: Iterable[str]) -> list[str]:
    """Which of these settings name a data set of the hub instead of paths."""
    paths = ((name, getattr(settings, name, None)) for name in names)
    return [name for name, path in paths if isinstance(path, Path) and is_hub_name(path)]


def parse_columns(words: Sequence[str]) -> dict[str, str]:
    """Names of columns by words such as `prompt=question`; raises ConfigError."""
    pairs = [word.partition("=") for word in words]
    problems = [
        f"{shown(word)} is no pair of columns"
        for word, (name, _, column) in zip(words, pairs, strict=True)
        if not name or not column
    ]
    for which, names in (("name", [pair[0] for pair in pairs]), ("column", [pair[2] for pair in pairs])):
        problems += [
            f"{shown(each)} is a {which} twice" for each in sorted({*names}) if names.count(each) > 1
        ]
    if problems:
        raise ConfigError(
            "--columns can't be used:",
            problems,
            remedy="give --columns prompt=question completion=answer",
            code="columns-unusable",
        )
    return {name: column for name, _, column in pairs}


def _renamed(fields: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """The columns of a row by their new names; a column that had one of them before is not read any more."""
    moved = {name: fields[column] for name, column in renamed.items() if column in fields}
    rest = {
        column: value
        for column, value in fields.items()
        if column not in renamed and column not in renamed.values()
    }
    return {**moved, **rest}


def _of_hub(name: str, part: Part) -> Source:
    what = f"{name} can't be read as data"
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
            remedy=f"check the path, or {install_extra('data')}",
            code="package-missing",
        ) from None
    repository, _, configuration = name.partition(":")
    try:
        if not constants.HF_HUB_OFFLINE:
            # One question, once: the library itself would try again and again.
            HfApi().dataset_info(repository, timeout=_SECONDS)
        once = datasets.DownloadConfig(max_retries=0)
        splits = datasets.get_dataset_split_names(repository, configuration or None, download_config=once)
        split = next((each for each in PART_NAMES[part] if each in splits), None)
        if split is None:
            raise DataError(
                what,
                [f"it has no {part} rows: its splits are {', '.join(splits)}"],
                remedy="name a file",
                code="part-missing",
            )
        loaded = datasets.load_dataset(repository, configuration or None, split=split, download_config=once)
        rows = [
            Row(number, without_nulls(table_value(dict(fields)))) for number, fields in enumerate(loaded, 1)
        ]
    except DataError:
        raise
    except Exception as error:  # the library raises what its parts raise
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DataError(
            what,
            [
                "there is no such file or folder, and no such data set could be had: "
                f"{type(error).__name__}: {reason}"
            ],
            remedy="check name and connection; HF_HUB_OFFLINE=1 takes a data set that was loaded before",
            code="data-set-missing",
        ) from None
    content = json.dumps([json_fields(row.fields) for row in rows], sort_keys=True).encode()
    return Source(f"{name} ({split})", rows, hashlib.sha256(content).hexdigest())
