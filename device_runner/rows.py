"""`prge rows`: what a file of rows holds, feedback above all, and rows that are to be forgotten."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from prge.errors import DataError, printable, shortened
from prge.host.terminal import best_effort
from prge.rows.readers.feedback import Fields, forget_rows, is_feedback, read_lines, texts_of
from prge.verbs.inputs import InputFile
from prge.verbs.outputs import OutputFile
from prge.verbs.settings import parse_settings
from prge.verbs.subverbs import Action, run_action

_LONGEST = 300


@dataclass(frozen=True)
class ShowSettings:
    """Print the rows of a jsonl file for a person, each with its number."""

    file: InputFile
    """Of feedback, or of other rows: jsonl."""
    match: str | None = None
    """Only rows with this text in any of their columns, in upper or lower case."""


@dataclass(frozen=True)
class ForgetSettings:
    """Take rows out of a jsonl file; an adapter that was trained on them stays as it is."""

    ONE_OF: ClassVar = (("match", "row"),)

    file: OutputFile
    """Of feedback, or of other rows: jsonl."""
    match: str | None = None
    """Rows with this text in any of their columns, in upper or lower case."""
    row: tuple[int, ...] = ()
    """Rows by the numbers that `prge rows show` prints."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge rows --help`."""
    actions = {
        "show": Action("print rows with their numbers", show),
        "forget": Action("take rows out of a file", forget),
    }
    return run_action(argv, actions, "prge rows", "Read rows of feedback, and remove some.")


def show(argv: Sequence[str]) -> int:
    """Print rows; raises DataError or RunError where there are none."""
    settings = parse_settings(ShowSettings, argv, "prge rows show", ["file"])
    path, meant = _existing(settings.file), _matching(settings.match)
    count = 0
    with best_effort(sys.stdout):
        for number, fields, line in read_lines(path):
            if meant(number, fields, line):
                count += 1
                print(f"row {number}", *_told(fields, line), sep="\n  ")
        print(f"{count} {'row' if count == 1 else 'rows'}")
    return 0


def forget(argv: Sequence[str]) -> int:
    """Remove rows; raises DataError or RunError."""
    settings = parse_settings(ForgetSettings, argv, "prge rows forget", ["file"])
    path = _existing(settings.file)
    if settings.match == "":
        raise DataError(
            "no row is forgotten", ["--match is empty: it would be every row"], code="settings-unusable"
        )
    meant = _matching(settings.match) if settings.match else lambda number, *_: number in settings.row
    removed = forget_rows(path, meant)
    with best_effort(sys.stdout):
        print(f"{path}: {removed} {'row' if removed == 1 else 'rows'} removed")
        if removed:
            print("adapters that were trained on them stay as they are: train again without them")
    return 0


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(
            f"{path} can't be read as rows",
            ["there is no such file"],
            remedy="check the path",
            code="file-missing",
        )
    return path


def _matching(text: str | None) -> Callable[[int, Fields | None, str], bool]:
    """Whether a row has a text; one that can't be read has it where its line does."""
    wanted = (text or "").casefold()

    def matches(number: int, fields: Fields | None, line: str) -> bool:
        texts = [line] if fields is None else texts_of(fields)
        return not wanted or any(wanted in each.casefold() for each in texts)

    return matches


def _told(fields: Fields | None, line: str) -> list[str]:
    """A row in lines."""
    if fields is None:
        return [f"can't be read: {_short(line)}"]
    if not is_feedback(fields):
        return [f"{_short(name)}: {_short(value)}" for name, value in fields.items()]
    lines = [f"{_short(fields.get('time', ''))} {_short(fields.get('model', ''))}"]
    messages = fields.get("messages")
    turns = messages if isinstance(messages, list) else [{"role": "asked", "content": fields.get("prompt")}]
    for turn in turns:
        turn = turn if isinstance(turn, Mapping) else {"role": "?", "content": turn}
        lines.append(f"{_short(turn.get('role', '?')):<10}{_short(turn.get('content', ''))}")
    lines.append(f"{'answered':<10}{_short(fields['answer'])}")
    for name, called in (("rating", "rated"), ("correction", "better")):
        lines += [f"{called:<10}{_short(fields[name])}"] if name in fields else []
    return lines


def _short(value: Any) -> str:
    return printable(shortened(str(value).replace("\n", "\\n"), _LONGEST))
