"""Kill runs again and again, resume them, and compare the result with a run that was never killed.

The result, the journal and every checkpoint must have equal bytes, and metrics.jsonl and run.json equal
counts of rows and records.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from child import Child, Limits, run_prge
from damaged_files import WORKSTATION_LIMITS
from outcome import Case, Findings, Verdict, judge, judge_success
from tables import TABLES
from workshop import BUNDLE_TYPES, Bench, Workshop

from prge.errors import INTERRUPTED

LIMITS = Limits(seconds=300, processor_seconds=120, memory=None)
_KILLS, _WORKSTATION_KILLS = (6, 16), 3


def attack_a_run(bench: Bench, random: Random, folder: Path) -> Findings:
    """Kill a run with random settings several times."""
    bundle_type = random.choice(bench.workshop.bundle_types)
    name, arguments = f"run: {bundle_type}", _run_words(bench.workshop, bundle_type, random)
    return _attack_case(name, arguments, random, folder)


def attack_a_run_with_torch(bench: Bench, random: Random, folder: Path) -> Findings:
    """Kill a run on the torch engine several times."""
    bundle_type = random.choice(["decoder", "quantized", "encoder"])
    name, arguments = (
        f"run with torch: {bundle_type}",
        [*_run_words(bench.workshop, bundle_type, random), "--engine", "torch"],
    )
    return _attack_case(name, arguments, random, folder)


def _run_words(workshop: Workshop, bundle_type: str, random: Random) -> list[str]:
    arguments = [
        "run",
        "--bundle",
        str(workshop.bundle(bundle_type)),
        *workshop.rows,
        "--quiet",
        "--threads",
        "1",
    ]
    arguments += ["--learning-rate", "0.01", "--divergence-ratio", "1000"]
    for choices in (TABLES["of_kind"][bundle_type], *TABLES["of_all"]):
        arguments += random.choice(choices).split()
    return arguments


def _attack_case(name: str, arguments: list[str], random: Random, folder: Path) -> Findings:
    counts: Counter[str] = Counter(runs=1)
    began = time.monotonic()
    whole, killed = folder / "whole", folder / "killed"
    result = run_prge([*arguments, "--out", whole], LIMITS)
    if result.code != 0:
        return [Case.of(name, judge_success(result), result)], counts
    seconds = time.monotonic() - began
    remaining = random.randint(*_KILLS)
    while True:
        resume = [arguments[0], "--resume", killed]
        child = Child(resume if (killed / "config.yaml").is_file() else [*arguments, "--out", killed], LIMITS)
        signals = _kill_at_random(child, killed, seconds, random) if remaining > 0 else ""
        result = child.wait()
        if signals and result.code in (-signal.SIGKILL, -signal.SIGTERM, INTERRUPTED):
            remaining -= 1
            counts["kills"] += 1
            counts[f"kills by {signals}"] += 1
            counts[f"kills of {name}"] += 1
            continue
        if result.code != 0:
            return [Case.of(name, judge_success(result), result)], counts
        if problem := differences(whole, killed):
            return [Case.of(name, Verdict.DIFFERENT, result, problem)], counts
        if remaining <= 0:
            break
        shutil.rmtree(killed)  # the run ended before the kill: start again until all kills are done
    return [Case(name, Verdict.ACCEPTED)], counts


def attack_a_workstation(bench: Bench, random: Random, folder: Path) -> Findings:
    """Kill an export, a publication or a replay: it must leave nothing or everything, and work again."""
    counts: Counter[str] = Counter(runs=1)
    finished, model = bench.original("decoder", "finished"), bench.workshop.model("llama")
    publish = [
        "publish",
        finished,
        "--bundle",
        bench.workshop.bundle("decoder"),
        "--model",
        model,
        "--format",
    ]
    calls: dict[str, list[object]] = {
        "export": ["export", "--model", model, *BUNDLE_TYPES["decoder"][1], "--roles", "forward"],
        **{f"publish {form}": [*publish, form] for form in ("peft", "merged", "llm")},
        "replay": ["replay", finished],
    }
    name = random.choice([*calls, "publish peft", "replay"])
    arguments, out = calls[name], folder / "place" / "out"
    out.parent.mkdir()
    began = time.monotonic()
    whole = run_prge([*arguments, "--out", folder / "whole"], WORKSTATION_LIMITS)
    if whole.code:
        return [Case.of(name, judge_success(whole), whole)], counts
    seconds, expected = time.monotonic() - began, _tree(folder / "whole")
    for _ in range(_WORKSTATION_KILLS):
        child = Child([*arguments, "--out", out], WORKSTATION_LIMITS)
        if random.random() < 0.5:
            child.has_ended(random.uniform(0, seconds))
        else:  # while the result is being written
            while not any(out.parent.iterdir()) and not child.has_ended(0.0005):
                continue
            child.has_ended(random.uniform(0, 0.01))
        if child.signal(signal.SIGKILL):
            counts["kills"] += 1
            counts[f"kills of {name}"] += 1
        result = child.wait()
        if out.exists():
            if problem := describe_differences(expected, _tree(out)):
                return [Case.of(name, Verdict.DIFFERENT, result, problem)], counts
            shutil.rmtree(out)
    again = run_prge([*arguments, "--out", out], WORKSTATION_LIMITS)
    verdict = judge(again) or Verdict.ACCEPTED
    remaining = sorted(path.name for path in out.parent.iterdir() if path != out)
    problem = describe_differences(expected, _tree(out)) + (
        f"\nleft beside it: {remaining}" if remaining else ""
    )
    if verdict is Verdict.ACCEPTED and problem:
        verdict = Verdict.DIFFERENT
    return [Case.of(f"{name}, killed", verdict, again, problem)], counts


def differences(whole: Path, killed: Path) -> str:
    """Describe the differences between a killed and an uninterrupted run; empty if there are none."""
    return describe_differences(run_artifacts(whole), run_artifacts(killed))


def describe_differences(whole: dict[str, object], killed: dict[str, object]) -> str:
    """Return a line for each difference."""
    return "\n".join(
        f"{name}: {_format_value(whole.get(name))}, killed: {_format_value(killed.get(name))}"
        for name in sorted(whole.keys() | killed.keys())
        if whole.get(name) != killed.get(name)
    )


def run_artifacts(run: Path) -> dict[str, object]:
    """Return what must be equal, by name: bytes of files and counts of records."""
    names = [path for top in ("final", "checkpoints") for path in (run / top).rglob("*") if path.is_file()]
    artifacts: dict[str, object] = {str(path.relative_to(run)): path.read_bytes() for path in names}
    if (run / "journal.jsonl").is_file():
        artifacts["journal.jsonl"] = (run / "journal.jsonl").read_bytes()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    artifacts["counts of metrics.jsonl"] = sorted(
        (r["event"], r["step"], r["forward_passes"]) for r in metrics
    )
    summary = json.loads((run / "run.json").read_text())
    artifacts["counts of run.json"] = [
        summary["train"][name] for name in ("steps", "forward_passes", "trained_values")
    ]
    artifacts["status"] = summary["run"]["status"]
    artifacts["leftovers"] = sorted(path.name for path in run.rglob("*.partial"))
    return artifacts


def _format_value(value: object) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value)[:600] if value is not None else "nothing"


def _kill_at_random(child: Child, run: Path, seconds: float, random: Random) -> str:
    """Send signals to a run at a random instant; return their name, or an empty text if it had ended."""
    instants: list[Callable[[], bool]] = [
        lambda: child.has_ended(random.uniform(0, seconds)),
        lambda: child.has_ended(random.uniform(0.5, 1.1) * seconds),
        lambda: _wait_for_change(child, lambda: _partials(run), random),
        lambda: _wait_for_change(child, lambda: _size(run / "journal.jsonl"), random),
    ]
    if random.choice(instants)():
        return ""
    name = random.choice([*["SIGKILL"] * 5, "SIGTERM", "SIGINT", "SIGINT twice"])
    number = signal.Signals[name.removesuffix(" twice")]
    for index in range(2 if name.endswith("twice") else 1):
        if index:
            child.has_ended(random.uniform(0, 0.02))
        if not child.signal(number):
            return name if index else ""
    return name


def _wait_for_change(child: Child, observe: Callable[[], object], random: Random) -> bool:
    """Wait until an observed value has changed several times; return whether the run ended before."""
    last = observe()
    for _ in range(random.randint(1, 6)):
        while (now := observe()) == last:
            if child.has_ended(0.0005):
                return True
        last = now
    return child.has_ended(random.choice([0.0, 0.0, random.uniform(0, 0.005)]))


def _partials(run: Path) -> Sequence[str]:
    """Return names of files and folders that are being written."""
    names = []
    for folder in (run, run / "checkpoints", run / "trunk_cache"):
        try:
            names += [name for name in os.listdir(folder) if name.endswith(".partial")]
        except OSError:
            continue
    return sorted(names)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tree(folder: Path) -> dict[str, object]:
    """Return the files of a folder without those that hold times."""
    files = ((str(path.relative_to(folder)), path) for path in sorted(folder.rglob("*")) if path.is_file())
    return {name: path.read_bytes() for name, path in files if name not in ("manifest.json", "README.md")}
