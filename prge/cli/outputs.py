"""Types of settings that name what a verb writes, and the check of these paths before the verb begins.

    json: OutputFile | None = None
    out: OutputFolder

A path that can't be written is refused at once. The check changes neither the content nor the mode of
existing files.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from prge.cli.bounds import flag
from prge.cli.field_types import find_marks
from prge.errors import ConfigError
from prge.system.atomic import check_file, check_writable_folder


class Output(Enum):
    """What a setting names as an output."""

    FILE = "file"
    APPENDED = "file that rows are appended to"
    FOLDER = "folder"


OutputFile: TypeAlias = Annotated[Path, Output.FILE]
AppendedFile: TypeAlias = Annotated[Path, Output.APPENDED]
OutputFolder: TypeAlias = Annotated[Path, Output.FOLDER]


def output_settings(settings_type: type[Any]) -> Mapping[str, Output]:
    """Return the outputs among the settings of a class, by name."""
    return find_marks(settings_type, Output)


def check_outputs(settings: Any) -> None:
    """Check that all outputs of settings can be written; nothing is created, written or opened.

    Raises:
        RunError: An output can't be written.
        ConfigError: An output is the same file as another setting.
    """
    outputs = output_settings(type(settings))
    paths = {item.name: [*_paths(getattr(settings, item.name))] for item in dataclasses.fields(settings)}
    for name, output in outputs.items():
        for path in paths[name]:
            if output is Output.FOLDER:
                check_writable_folder(path)
                continue
            check_file(path)
            same = [other for other in paths if other != name and _target(path) in map(_target, paths[other])]
            if same:
                raise ConfigError(
                    "These settings can't be used:",
                    [f"{flag(name)} and {flag(same[0])} are the same file, {path}"],
                    remedy="Give another file to write.",
                    code="outputs-same-file",
                )


def _paths(value: Any) -> Iterator[Path]:
    """Yield the paths of a setting's value; a text counts if a file of this name exists."""
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, Path) or (isinstance(each, str) and os.path.isfile(each)):
            yield Path(each)


def _target(path: Path) -> str:
    return os.path.realpath(path)
