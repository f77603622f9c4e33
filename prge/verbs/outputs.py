"""Settings that name what a verb writes, and the one check of such places, which changes nothing.

    json: OutputFile | None = None
    out: OutputFolder

A path that is declared so is checked before the verb begins: one that can't be written is refused at once,
and what lies there stays as it is, in bytes and in mode.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from prge.errors import ConfigError
from prge.host.atomic import check_file, check_place
from prge.verbs.bounds import flag
from prge.verbs.kinds import marks_of


class Output(Enum):
    """What a verb writes to a path."""

    FILE = "file"
    APPENDED = "file that rows are appended to"
    FOLDER = "folder"


OutputFile: TypeAlias = Annotated[Path, Output.FILE]
AppendedFile: TypeAlias = Annotated[Path, Output.APPENDED]
OutputFolder: TypeAlias = Annotated[Path, Output.FOLDER]


def outputs_of(settings_type: type[Any]) -> Mapping[str, Output]:
    """What each setting names that a verb writes; settings that name nothing of the kind are left out."""
    return marks_of(settings_type, Output)


def check_outputs(settings: Any) -> None:
    """See whether all places can be written that settings name. Nothing is written, made or opened.

    Raises:
        RunError: one can't be written.
        ConfigError: a file would be written over another one that the settings name.
    """
    outputs = outputs_of(type(settings))
    paths = {item.name: [*_paths(getattr(settings, item.name))] for item in dataclasses.fields(settings)}
    for name, output in outputs.items():
        for path in paths[name]:
            if output is Output.FOLDER:
                check_place(path)
                continue
            check_file(path)
            same = [other for other in paths if other != name and _target(path) in map(_target, paths[other])]
            if same:
                raise ConfigError(
                    "these settings can't be used:",
                    [f"{flag(name)} and {flag(same[0])} are the same file, {path}"],
                    remedy="give another file to write",
                    code="outputs-same-file",
                )


def _paths(value: Any) -> Iterator[Path]:
    """The paths of a setting's value; a text is one where there is such a file."""
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, Path) or (isinstance(each, str) and os.path.isfile(each)):
            yield Path(each)


def _target(path: Path) -> str:
    return os.path.realpath(path)
