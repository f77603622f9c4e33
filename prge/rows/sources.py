"""What a user names as rows: a file, a folder with a file for each part, or a data set of Hugging Face's hub.

A folder holds `train`, `valid` and `test` as files, as for MLX. A data set is named as on the hub, a
configuration of it after a colon: `nyu-mll/glue:sst2`. A path that exists is never taken for a data set.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from prge.errors import ConfigError, DataError, shown
from prge.files.bundle import file_sha256
from prge.host.packages import install_extra
from prge.learning.preferences import ObjectiveName
from prge.rows.feedback import is_feedback, problem_of
from prge.rows.feedback_rows import rows_of_feedback
from prge.rows.forms import column_names, present_columns
from prge.rows.readers import FORMATS, Row, plain_value, read_rows

Part = Literal["train", "dev", "test"]
_NAMES: Mapping[Part, tuple[str, ...]] = {
    "train": ("train",),
    "dev": ("valid", "validation", "dev", "val"),
    "test": ("test",),
}
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
    where: Path | str,
    part: Part = "train",
    columns: Sequence[str] = (),
    broken: list[str] | None = None,
    objective: ObjectiveName = "completion",
) -> Source:
    """Read the rows that a user names; feedback becomes rows to learn from.

    Args:
        where: a file, a folder, or the name of a data set.
        part: which file of a folder, or split of a data set.
        columns: words such as `prompt=question`, which call the file's column `question` `prompt`.
        broken: as of `read_rows`.
        objective: what feedback is to become rows of.

    Raises:
        ConfigError: `columns` are no such words.
        DataError: there are no such rows or columns, they can't be read, or not offline.
    """
    renamed = parse_columns(columns)
    path = rows_file(where, part)
    if path is not None:
        rows = read_rows(path, broken)
        source = Source(str(path), rows, file_sha256(path), renamed)
    else:
        source = _of_hub(str(where), part, renamed)
    if not renamed:
        return _learnable(source, broken, objective)
    present = present_columns(source.rows)
    if lacking := [column for column in renamed.values() if column not in present]:
        raise DataError(
            f"{source.name} can't be used",
            [f"no row has the column {shown(column)}, which --columns names" for column in lacking],
            remedy=f"its columns are {column_names(present)}",
        )
    rows = [Row(row.number, _renamed(row.fields, renamed)) for row in source.rows]
    return Source(source.name, rows, source.sha256, renamed)


def _learnable(source: Source, broken: list[str] | None, objective: ObjectiveName) -> Source:
    """The same rows, or those that feedback becomes; raises DataError as `read_rows`."""
    rows = [row for row in source.rows if is_feedback(row.fields)]
    if not rows:
        return source
    what = f"{source.name} can't be used"
    if len(rows) < len(source.rows):
        raise DataError(what, ["it mixes feedback with other rows"], remedy="make a file of each")
    found = {row.number: problem_of(row.fields) for row in rows}
    problems: list[str] = [] if broken is None else broken
    problems += [f"row {number}: {problem}" for number, problem in found.items() if problem]
    made, told = rows_of_feedback([row for row in rows if not found[row.number]], objective)
    if (problems and broken is None) or not made:
        raise DataError(what, problems or [f"no row is left to learn from: {told}"], remedy="correct them")
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
    names = " or ".join(_NAMES[part])
    problem = f"it has {', '.join(path.name for path in found)}" if found else "it has none"
    raise DataError(
        f"{folder} must have one file of {part} rows, {names} with one of {', '.join(FORMATS)}",
        [problem],
        remedy="name the file itself",
    )


def files_of_part(folder: Path, part: Part) -> list[Path]:
    """The files of a folder that may hold a part's rows; none where it is no folder."""
    wanted = [folder / f"{name}{suffix}" for name in _NAMES[part] for suffix in FORMATS]
    return [path for path in wanted if path.is_file()]


def is_hub_name(path: Path) -> bool:
    """Whether a path is none that exists and may name a data set of the hub."""
    return (
        not path.exists()
        and path.suffix.lower() not in FORMATS
        and _HUB_NAME.fullmatch(path.as_posix()) is not None
    )


def hub_names(settings: object, names: Sequence[str]) -> list[str]:
    """Which of these settings name a data set of the hub instead of a path."""
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
            "--columns can't be used:", problems, remedy="give --columns prompt=question completion=answer"
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


def _of_hub(name: str, part: Part, renamed: Mapping[str, str]) -> Source:
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
        ) from None
    repository, _, configuration = name.partition(":")
    try:
        if not constants.HF_HUB_OFFLINE:
            # One question, once: the library itself would try again and again.
            HfApi().dataset_info(repository, timeout=_SECONDS)
        once = datasets.DownloadConfig(max_retries=0)
        splits = datasets.get_dataset_split_names(repository, configuration or None, download_config=once)
        split = next((each for each in _NAMES[part] if each in splits), None)
        if split is None:
            raise DataError(
                what, [f"it has no {part} rows: its splits are {', '.join(splits)}"], remedy="name a file"
            )
        loaded = datasets.load_dataset(repository, configuration or None, split=split, download_config=once)
        rows = [Row(number, plain_value(dict(fields))) for number, fields in enumerate(loaded, 1)]
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
        ) from None
    content = json.dumps([row.fields for row in rows], sort_keys=True).encode()
    return Source(f"{name} ({split})", rows, hashlib.sha256(content).hexdigest(), renamed)
