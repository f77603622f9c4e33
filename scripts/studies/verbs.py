"""Shared parts of studies: flags, calls of the verbs as a user would make them, and tables over seeds."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from prge.cli.subprocesses import read_json, verb_command
from prge.formats.run_folder import read_metrics

DEMO = Path(__file__).resolve().parents[2] / "server_export" / "demo_data"


def make_parser(description: str | None, seeds: Sequence[int] = (42, 1337, 2025)) -> argparse.ArgumentParser:
    """Return a parser with the common flags of all studies."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for bundles, runs and results.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*seeds])
    return parser


def report(results: dict[str, Any], out: Path) -> None:
    """Write a study's results as JSON into its folder, and print them."""
    text = json.dumps(results, indent=2)
    (out / "results.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def prge(verb: str, *arguments: object, **flags: Any) -> None:
    """Call a verb with its output on stderr, so that a study prints only JSON."""
    _call(verb, *arguments, **flags)


def make_once(verb: str, out: Path, *arguments: object, **flags: Any) -> Path:
    """Return the folder that a verb writes; the verb is called only if the folder doesn't exist."""
    result_folder = out / "final" if verb in ("run", "baseline") else out
    if not result_folder.exists():
        prge(verb, *arguments, out=out, **flags)
    return out


def evaluate(result: Path, **flags: Any) -> dict[str, Any]:
    """Return the result of `prge eval`, kept in the file `result`."""
    if not result.exists():
        prge("eval", json=result, **flags)
    return read_json(result)


def answers(**flags: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the completions of `prge generate` by adapter name."""
    results: dict[str, list[dict[str, Any]]] = {}
    for line in _call("generate", json=[], stdout=subprocess.PIPE, **flags).splitlines():
        answer = json.loads(line)
        results.setdefault(answer["adapter"], []).append(answer)
    return results


def _call(*arguments: object, stdout: Any = sys.stderr, **flags: Any) -> str:
    command = verb_command(
        *arguments, *(word for name, value in flags.items() for word in _flag(name, value))
    )
    return subprocess.run(command, check=True, stdout=stdout, text=True).stdout or ""


def _flag(name: str, value: Any) -> list[str]:
    """Return a flag as arguments; None omits it, True has no value."""
    if value is None:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    return [f"--{name.replace('_', '-')}", *(map(str, values) if value is not True else ())]


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the evaluation records of a run's metrics in order."""
    return [record for record in read_metrics(run) if record["event"] == "evaluation"]


def training_summary(run: Path) -> dict[str, Any]:
    """Return the training summary of a run or baseline."""
    results: dict[str, Any] = read_json(run / "run.json")["train"]
    return results


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """Write rows as jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def summarize(runs: list[dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Return mean, lowest and highest value of each figure over seeds, and the runs themselves."""
    table = {
        name: {"mean": statistics.mean(values), "lowest": min(values), "highest": max(values)}
        for name in names
        for values in [[run[name] for run in runs]]
    }
    return {**table, "runs": runs}
