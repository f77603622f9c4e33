"""What the studies share: calling the verbs as a user would, and tables over seeds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prge.verbs.starting import command_of


def prge(verb: str, *words: object, **flags: Any) -> None:
    """Call a verb; its output goes to the error stream, so that a study prints JSON alone."""
    _call(verb, *words, **flags)


def answers(**flags: Any) -> dict[str, list[dict[str, Any]]]:
    """What `prge generate` writes for rows, by the names of the adapters."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in _call("generate", json=[], stdout=subprocess.PIPE, **flags).splitlines():
        answer = json.loads(line)
        found.setdefault(answer["adapter"], []).append(answer)
    return found


def _call(*words: object, stdout: Any = sys.stderr, **flags: Any) -> str:
    command = command_of(*words, *(word for name, value in flags.items() for word in _flag(name, value)))
    return subprocess.run(command, check=True, stdout=stdout, text=True).stdout or ""


def _flag(name: str, value: Any) -> list[str]:
    """A flag as words; None leaves it out, True gives it bare."""
    if value is None:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    return [f"--{name.replace('_', '-')}", *(map(str, values) if value is not True else ())]


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Evaluation records of a run's metrics, in order."""
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record for record in records if record["event"] == "evaluation"]


def summarize(runs: list[dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Mean, lowest and highest of each figure over the seeds, and the runs themselves."""
    table = {
        name: {"mean": statistics.mean(values), "lowest": min(values), "highest": max(values)}
        for name in names
        for values in [[run[name] for run in runs]]
    }
    return {**table, "runs": runs}
