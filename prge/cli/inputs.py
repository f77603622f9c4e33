"""Types of settings that name what a verb reads, so that it can be copied to another machine.

    bundle: BundleInput
    train: TrainRows
    adapter: AdapterInput | None = None

A setting is an input, an output (prge/cli/outputs.py), or a value with the same meaning on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from prge.cli.field_types import Paths, find_marks


class Input(Enum):
    """The type of input that a setting names."""

    FILE = "file"
    FOLDER = "folder"
    PATH = "file or folder"
    BUNDLE = "bundle"
    MODEL = "bundle, or folder of `prge tune`"
    ADAPTER = "run, checkpoint or PEFT folder"
    TRAIN_ROWS = "training rows"
    DEV_ROWS = "development rows"
    TEST_ROWS = "test rows"
    TEXT = "text, or - for standard input"
    REWARD = "Python file and function, or YAML file"


# Settings that name rows, and the part that each reads from a folder of row files.
PART_OF_ROWS: Mapping[Input, Literal["train", "dev", "test"]] = {
    Input.TRAIN_ROWS: "train",
    Input.DEV_ROWS: "dev",
    Input.TEST_ROWS: "test",
}

InputFile: TypeAlias = Annotated[Path, Input.FILE]
# The name of something that is included in prge, such as a task, or a file.
NamedOrFile: TypeAlias = Annotated[str, Input.FILE]
InputFolder: TypeAlias = Annotated[Path, Input.FOLDER]
InputPath: TypeAlias = Annotated[Path, Input.PATH]
BundleInput: TypeAlias = Annotated[Path, Input.BUNDLE]
ModelInput: TypeAlias = Annotated[Path, Input.MODEL]
AdapterInput: TypeAlias = Annotated[Path, Input.ADAPTER]
# PATH or NAME=PATH, or the name of an adapter that needs no path.
NamedAdapter: TypeAlias = Annotated[str, Input.ADAPTER]
# Rows as a user names them: files, a folder with a file for each part, or a data set of the hub.
TrainRows: TypeAlias = Annotated[Paths, Input.TRAIN_ROWS]
DevRows: TypeAlias = Annotated[Paths, Input.DEV_ROWS]
TestRows: TypeAlias = Annotated[Paths, Input.TEST_ROWS]
TextInput: TypeAlias = Annotated[str, Input.TEXT]
# FILE.py, FILE.py:FUNCTION or FILE.yaml.
RewardInput: TypeAlias = Annotated[str, Input.REWARD]


def split_reward(word: str) -> tuple[Path, str]:
    """Return the file of a reward, and the name of its function; empty if it is not given."""
    path, separator, function = word.rpartition(":")
    return (Path(path), function) if separator and path.endswith(".py") else (Path(word), "")


def join_reward(path: Path | str, function: str) -> str:
    """Return the word that names a reward; see `split_reward`."""
    return f"{path}:{function}" if function else str(path)


def input_settings(settings_type: type[Any]) -> Mapping[str, Input]:
    """Return the inputs among the settings of a class, by name."""
    return find_marks(settings_type, Input)
