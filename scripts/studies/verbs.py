"""What the studies share: flags, calls of the verbs as a user would make them, and tables over seeds."""

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
    """A parser with the flags that all studies have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for bundles, runs and results.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*seeds])
    return parser


def report(results: dict[str, Any], out: Path) -> None:
    """Keep a study's results as JSON in its folder, and print them."""
    text = json.dumps(results, indent=2)
    (out / "results.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def prge(verb: str, *words: object, **flags: Any) -> None:
    """Call a verb; its output goes to the error stream, so that a study prints JSON alone."""
    _call(verb, *words, **flags)


def made(verb: str, out: Path, *words: object, **flags: Any) -> Path:
    """The folder that a verb makes, made unless it was before."""
    whole = out / "final" if verb in ("run", "baseline") else out
    if not whole.exists():
        prge(verb, *words, out=out, **flags)
    return out


def scored(result: Path, **flags: Any) -> dict[str, Any]:
    """What `prge eval` tells, kept in the file `result`."""
    if not result.exists():
        prge("eval", json=result, **flags)
    return read_json(result)


def answers(**flags: Any) -> dict[str, list[dict[str, Any]]]:
    """What `prge generate` writes for rows, by the names of the adapters."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in _call("generate", json=[], stdout=subprocess.PIPE, **flags).splitlines():
        answer = json.loads(line)
        found.setdefault(answer["adapter"], []).append(answer)
    return found


def _call(*words: object, stdout: Any = sys.stderr, **flags: Any) -> str:
    command = verb_command(*words, *(word for name, value in flags.items() for word in _flag(name, value)))
    return subprocess.run(command, check=True, stdout=stdout, text=True).stdout or ""


def _flag(name: str, value: Any) -> list[str]:
    """A flag as words; None leaves it out, True gives it bare."""
    if value is None:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    return [f"--{name.replace('_', '-')}", *(map(str, values) if value is not True else ())]


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Evaluation records of a run's metrics, in order."""
    return [record for record in read_metrics(run) if record["event"] == "evaluation"]


def trained(run: Path) -> dict[str, Any]:
    """What a run, or a baseline, tells of its training."""
    found: dict[str, Any] = read_json(run / "run.json")["train"]
    return found


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """Write rows as jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def summarize(runs: list[dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Mean, lowest and highest of each figure over the seeds, and the runs themselves."""
    table = {
        name: {"mean": statistics.mean(values), "lowest": min(values), "highest": max(values)}
        for name in names
        for values in [[run[name] for run in runs]]
    }
    return {**table, "runs": runs}
