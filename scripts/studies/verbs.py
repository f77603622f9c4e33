"""What the studies share: calling the verbs as a user would, and tables over seeds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def prge(verb: str, *words: object, **flags: Any) -> None:
    """Call a verb; its output goes to the error stream, so that a study prints JSON alone."""
    _call("-m", "prge.cli", verb, *words, **flags)


def principal_adapter(**flags: Any) -> None:
    """Make an adapter to start from; see scripts/studies/principal_adapter.py."""
    _call(Path(__file__).with_name("principal_adapter.py"), **flags)


def _call(*words: object, **flags: Any) -> None:
    command = [sys.executable, *map(str, words)]
    for name, value in flags.items():
        values = value if isinstance(value, list | tuple) else [value]
        command += [f"--{name.replace('_', '-')}", *map(str, values)]
    subprocess.run(command, check=True, stdout=sys.stderr)


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
