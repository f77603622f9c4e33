"""`prge rows`: show the rows of a file, such as feedback, and remove rows from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from prge.cli.inputs import InputFile
from prge.cli.outputs import OutputFile
from prge.cli.settings import parse_settings
from prge.cli.subcommands import Action, run_action
from prge.data.readers.feedback import Fields, is_feedback, iter_texts, read_lines, remove_rows
from prge.errors import DataError, printable, shortened
from prge.system.terminal import best_effort

_LONGEST = 300


@dataclass(frozen=True)
class ShowSettings:
    """Print the rows of a jsonl file in readable form, each with its number."""

    EXAMPLE: ClassVar = "feedback.jsonl --match Berlin"

    file: InputFile
    """jsonl file of feedback or other rows."""
    match: str | None = None
    """Only rows that contain this text in any column, ignoring case."""


@dataclass(frozen=True)
class ForgetSettings:
    """Remove rows from a jsonl file; an adapter that was trained on them stays as it is."""

    EXAMPLE: ClassVar = "feedback.jsonl --row 3"
    ONE_OF: ClassVar = (("match", "row"),)

    file: OutputFile
    """jsonl file of feedback or other rows."""
    match: str | None = None
    """Rows that contain this text in any column, ignoring case."""
    row: tuple[int, ...] = ()
    """Rows by the numbers that `prge rows show` prints."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge rows --help`."""
    actions = {
        "show": Action("print rows with their numbers", show),
        "forget": Action("remove rows from a file", forget),
    }
    return run_action(argv, actions, "prge rows", "Show rows of feedback, or remove some.")


def show(argv: Sequence[str]) -> int:
    """Print rows; raises DataError or RunError if the file can't be read."""
    settings = parse_settings(ShowSettings, argv, "prge rows show", ["file"])
    path, matches = _existing(settings.file), _matching(settings.match)
    count = 0
    for number, fields, line in read_lines(path):
        if matches(number, fields, line):
            count += 1
            with best_effort(sys.stdout):
                print(f"row {number}", *_format_row(fields, line), sep="\n  ")
    with best_effort(sys.stdout):
        print(f"{count} {'row' if count == 1 else 'rows'}")
    return 0


def forget(argv: Sequence[str]) -> int:
    """Remove rows; raises DataError or RunError."""
    settings = parse_settings(ForgetSettings, argv, "prge rows forget", ["file"])
    path = _existing(settings.file)
    if settings.match == "":
        raise DataError(
            "No row was removed:", ["--match is empty: it would match every row"], code="settings-unusable"
        )
    matches = _matching(settings.match) if settings.match else lambda number, *_: number in settings.row
    removed = remove_rows(path, matches)
    with best_effort(sys.stdout):
        print(f"{path}: {removed} {'row' if removed == 1 else 'rows'} removed")
        if removed:
            print("adapters that were trained on removed rows don't change: train again without these rows")
    return 0


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(
            f"{path} can't be read as rows:",
            ["there is no such file"],
            remedy="Check the path.",
            code="file-missing",
        )
    return path


def _matching(text: str | None) -> Callable[[int, Fields | None, str], bool]:
    """Return a function that checks if a row contains a text; an unreadable row is searched as a line."""
    folded = (text or "").casefold()

    def matches(number: int, fields: Fields | None, line: str) -> bool:
        texts = [line] if fields is None else iter_texts(fields)
        return not folded or any(folded in each.casefold() for each in texts)

    return matches


def _format_row(fields: Fields | None, line: str) -> list[str]:
    """Format a row in lines."""
    if fields is None:
        return [f"can't be read: {_short(line)}"]
    if not is_feedback(fields):
        return [f"{_short(name)}: {_short(value)}" for name, value in fields.items()]
    lines = [f"{_short(fields.get('time', ''))} {_short(fields.get('model', ''))}"]
    messages = fields.get("messages")
    prompt = {"role": "prompt", "content": fields.get("prompt")}
    entries = messages if isinstance(messages, list) else [prompt]
    for entry in entries:
        message = entry if isinstance(entry, Mapping) else {"role": "?", "content": entry}
        lines.append(f"{_short(message.get('role', '?')):<11}{_short(message.get('content', ''))}")
    labels = [name for name in ("answer", "rating", "correction") if name in fields]
    return [*lines, *(f"{label:<11}{_short(fields[label])}" for label in labels)]


def _short(value: Any) -> str:
    return printable(shortened(str(value).replace("\n", "\\n"), _LONGEST))
