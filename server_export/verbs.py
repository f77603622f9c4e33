"""Other verbs of prge as steps of one: each in a process of its own, as a user would start it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from prge.errors import PrgeError


def run_verb(*words: object, quiet: bool = False) -> None:
    """Run one verb; `quiet` shows errors alone.

    Raises:
        PrgeError: it ended with another code than 0; its own message is on the terminal.
    """
    if not quiet:
        print("$ prge " + " ".join(map(str, words)), flush=True)
    code = subprocess.run(
        command_of(*words), check=False, stdout=subprocess.DEVNULL if quiet else None
    ).returncode
    if code:
        raise _failed(words, code)


def answer_of(*words: object, codes: Container[int] = (0,)) -> str:
    """What one verb prints.

    Raises:
        PrgeError: it ended with none of these codes; its own message is on the terminal.
    """
    done = subprocess.run(command_of(*words), check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode not in codes:
        raise _failed(words, done.returncode)
    return done.stdout


def command_of(*words: object) -> list[str]:
    """The command line of a verb."""
    return [sys.executable, "-m", "prge.cli", *map(str, words)]


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line; None leaves one out, True gives the bare flag."""
    words = []
    for name, value in settings.items():
        if value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"--{name.replace('_', '-')}", *(map(str, values) if value is not True else ())]
    return words


def json_of(path: Path) -> dict[str, Any]:
    """What a verb wrote with `--json`, or into a run folder."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _failed(words: Sequence[object], code: int) -> PrgeError:
    return PrgeError(
        f"`prge {words[0]}` ended with code {code}",
        remedy="its message is above; `prge doctor` may tell more",
    )
