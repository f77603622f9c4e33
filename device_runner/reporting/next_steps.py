"""Commands to type after a training run, for its bundle and task, ready to be copied."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prge.cli.inputs import split_reward

TEST_ROWS, PROMPT, BUNDLE, TASK, REWARD = "TEST_ROWS", "PROMPT", "BUNDLE", "TASK", "REWARD"


@dataclass(frozen=True)
class NextStep:
    """A command and its purpose; the user replaces words in capitals."""

    purpose: str
    command: str


def next_steps(run: Path, settings: Mapping[str, Any], finished: bool, writes: bool) -> list[NextStep]:
    """Return the commands that are useful after a run, the likeliest first.

    Args:
        run: folder of the run.
        settings: settings of `prge run`, by name.
        finished: whether the run has ended with a result.
        writes: whether the bundle of the run can generate text.
    """
    if not finished:
        return [NextStep("resume it", _command("run", "--resume", run))]
    on = ["--bundle", _path_or_placeholder(settings.get("bundle"), BUNDLE)]
    task = ["--task", _path_or_placeholder(settings["task"], TASK)] if settings.get("task") else []
    if reward := settings.get("reward"):
        task = ["--reward", _path_or_placeholder(reward, REWARD)]
    steps = [
        NextStep(
            "score it on rows that it was not trained on",
            _command("eval", *on, "--adapter", run, *task, "--data", TEST_ROWS),
        )
    ]
    if writes:
        steps.append(
            NextStep("generate text", _command("generate", *on, "--adapter", run, "--prompt", PROMPT))
        )
    return [
        *steps,
        NextStep("write a report of the run", _command("report", run, "--out", Path(run, "report.html"))),
        NextStep("publish the adapter for PEFT", _command("publish", run, *on, "--out", "adapter")),
    ]


def _path_or_placeholder(value: object, placeholder: str) -> str:
    """Return a name or path of the run, or a placeholder for a path that this machine doesn't have."""
    text = str(value or placeholder)
    return text if "/" not in text or split_reward(text)[0].exists() else placeholder


def _command(*words: object) -> str:
    return shlex.join(["prge", *map(str, words)])
