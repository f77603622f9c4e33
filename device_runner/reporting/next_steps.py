"""What one can type after a run: commands for its own bundle and task, ready to be copied."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEST_ROWS, PROMPT, BUNDLE, TASK = "TEST_ROWS", "PROMPT", "BUNDLE", "TASK"


@dataclass(frozen=True)
class NextStep:
    """What for, and the command; words in capitals are the user's to fill in."""

    purpose: str
    command: str


def next_steps(run: Path, settings: Mapping[str, Any], finished: bool, writes: bool) -> list[NextStep]:
    """The commands that come after a run, the likeliest first.

    Args:
        run: its folder.
        settings: of `prge run`, by name.
        finished: whether it has a result.
        writes: whether its bundle can write text.
    """
    if not finished:
        return [NextStep("go on with it", _command("run", "--resume", run))]
    on = ["--bundle", _place(settings.get("bundle"), BUNDLE)]
    task = ["--task", _place(settings["task"], TASK)] if settings.get("task") else []
    steps = [
        NextStep(
            "score it on rows that it never saw",
            _command("eval", *on, "--adapter", run, *task, "--data", TEST_ROWS),
        )
    ]
    if writes:
        steps.append(
            NextStep("let it write", _command("generate", *on, "--adapter", run, "--prompt", PROMPT))
        )
    return [
        *steps,
        NextStep("see all of the run on a page", _command("report", run, "--out", Path(run, "report.html"))),
        NextStep("give the adapter to PEFT", _command("publish", run, *on, "--out", "adapter")),
    ]


def _place(value: object, word: str) -> str:
    """A name or path as the run had it, or the word where it is a path of another machine."""
    text = str(value or word)
    return text if "/" not in text or Path(text).exists() else word


def _command(*words: object) -> str:
    return shlex.join(["prge", *map(str, words)])
