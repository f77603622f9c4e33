"""Runs that are killed again and again and resumed until they are done: they must leave what others leave.

A run is compared with one of the same settings that was never killed: the result, the journal and every
checkpoint byte for byte, and how many rows and records metrics.jsonl and run.json count.
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

from child import Child, Limits, prge_ends
from damaged_files import WORKSTATION_LIMITS
from outcome import Case, Found, Verdict, judged, worked
from tables import TABLES
from workshop import KINDS, Bench, Workshop

from prge.errors import INTERRUPTED

LIMITS = Limits(seconds=300, processor_seconds=120, memory=None)
_KILLS, _WORKSTATION_KILLS = (6, 16), 3


def attack_a_run(bench: Bench, random: Random, folder: Path) -> Found:
    """One run with settings of its own, killed a dozen times."""
    kind = random.choice(bench.workshop.kinds)
    name, words = f"run: {kind}", _run_words(bench.workshop, kind, random)
    return _attacked(name, words, random, folder)


def attack_a_run_with_torch(bench: Bench, random: Random, folder: Path) -> Found:
    """The same on the engine that takes torch."""
    kind = random.choice(["decoder", "quantized", "encoder"])
    name, words = f"run with torch: {kind}", [*_run_words(bench.workshop, kind, random), "--engine", "torch"]
    return _attacked(name, words, random, folder)


def _run_words(workshop: Workshop, kind: str, random: Random) -> list[str]:
    words = ["run", "--bundle", str(workshop.bundle(kind)), *workshop.rows, "--quiet", "--threads", "1"]
    words += ["--learning-rate", "0.01", "--divergence-ratio", "1000"]
    for choices in (TABLES["of_kind"][kind], *TABLES["of_all"]):
        words += random.choice(choices).split()
    return words


def _attacked(name: str, words: list[str], random: Random, folder: Path) -> Found:
    counts: Counter[str] = Counter(runs=1)
    began = time.monotonic()
    whole, killed = folder / "whole", folder / "killed"
    ended = prge_ends([*words, "--out", whole], LIMITS)
    if ended.code != 0:
        return [Case.of(name, worked(ended), ended)], counts
    seconds = time.monotonic() - began
    left = random.randint(*_KILLS)
    while True:
        resume = [words[0], "--resume", killed]
        child = Child(resume if (killed / "config.yaml").is_file() else [*words, "--out", killed], LIMITS)
        how = _killed(child, killed, seconds, random) if left > 0 else ""
        ended = child.wait()
        if how and ended.code in (-signal.SIGKILL, -signal.SIGTERM, INTERRUPTED):
            left -= 1
            counts["kills"] += 1
            counts[f"kills by {how}"] += 1
            counts[f"kills of {name}"] += 1
            continue
        if ended.code != 0:
            return [Case.of(name, worked(ended), ended)], counts
        if problem := differences(whole, killed):
            return [Case.of(name, Verdict.DIFFERENT, ended, problem)], counts
        if left <= 0:
            break
        shutil.rmtree(killed)  # it was done before the kill came: once more, until all kills are spent
    return [Case(name, Verdict.ACCEPTED)], counts


def attack_a_workstation(bench: Bench, random: Random, folder: Path) -> Found:
    """An export or a publication that is killed leaves nothing or all of it, and can be done again."""
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
        "export": ["export", "--model", model, *KINDS["decoder"][1], "--roles", "forward"],
        **{f"publish {form}": [*publish, form] for form in ("peft", "merged", "llm")},
        "replay": ["replay", finished],
    }
    name = random.choice([*calls, "publish peft", "replay"])
    words, out = calls[name], folder / "place" / "out"
    out.parent.mkdir()
    began = time.monotonic()
    whole = prge_ends([*words, "--out", folder / "whole"], WORKSTATION_LIMITS)
    if whole.code:
        return [Case.of(name, worked(whole), whole)], counts
    seconds, expected = time.monotonic() - began, _tree(folder / "whole")
    for _ in range(_WORKSTATION_KILLS):
        child = Child([*words, "--out", out], WORKSTATION_LIMITS)
        if random.random() < 0.5:
            child.has_ended(random.uniform(0, seconds))
        else:  # while the result is written
            while not any(out.parent.iterdir()) and not child.has_ended(0.0005):
                continue
            child.has_ended(random.uniform(0, 0.01))
        if child.signal(signal.SIGKILL):
            counts["kills"] += 1
            counts[f"kills of {name}"] += 1
        ended = child.wait()
        if out.exists():
            if problem := told_apart(expected, _tree(out)):
                return [Case.of(name, Verdict.DIFFERENT, ended, problem)], counts
            shutil.rmtree(out)
    again = prge_ends([*words, "--out", out], WORKSTATION_LIMITS)
    verdict = judged(again) or Verdict.ACCEPTED
    left = sorted(path.name for path in out.parent.iterdir() if path != out)
    problem = told_apart(expected, _tree(out)) + (f"\nleft beside it: {left}" if left else "")
    if verdict is Verdict.ACCEPTED and problem:
        verdict = Verdict.DIFFERENT
    return [Case.of(f"{name}, killed", verdict, again, problem)], counts


def differences(whole: Path, killed: Path) -> str:
    """What a killed run left otherwise than a whole one; empty if nothing."""
    return told_apart(left_by(whole), left_by(killed))


def told_apart(whole: dict[str, object], killed: dict[str, object]) -> str:
    """A line for each thing that was left otherwise."""
    return "\n".join(
        f"{name}: {_shown(whole.get(name))}, killed: {_shown(killed.get(name))}"
        for name in sorted(whole.keys() | killed.keys())
        if whole.get(name) != killed.get(name)
    )


def left_by(run: Path) -> dict[str, object]:
    """What must be the same, by name: bytes of files, counts of records."""
    names = [path for top in ("final", "checkpoints") for path in (run / top).rglob("*") if path.is_file()]
    left: dict[str, object] = {str(path.relative_to(run)): path.read_bytes() for path in names}
    if (run / "journal.jsonl").is_file():
        left["journal.jsonl"] = (run / "journal.jsonl").read_bytes()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    left["counts of metrics.jsonl"] = sorted((r["event"], r["step"], r["rows"]) for r in metrics)
    summary = json.loads((run / "run.json").read_text())
    left["counts of run.json"] = [summary["train"][name] for name in ("steps", "rows", "trained_values")]
    left["status"] = summary["run"]["status"]
    left["leftovers"] = sorted(path.name for path in run.rglob("*.partial"))
    return left


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value)[:600] if value is not None else "nothing"


def _killed(child: Child, run: Path, seconds: float, random: Random) -> str:
    """Send a run its end at an instant drawn by chance; how, or nothing if it had ended before."""
    instants: list[Callable[[], bool]] = [
        lambda: child.has_ended(random.uniform(0, seconds)),
        lambda: child.has_ended(random.uniform(0.5, 1.1) * seconds),
        lambda: _saw(child, lambda: _partials(run), random),
        lambda: _saw(child, lambda: _size(run / "journal.jsonl"), random),
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


def _saw(child: Child, look: Callable[[], object], random: Random) -> bool:
    """Wait until something changes for the n-th time; whether the run ended before."""
    last = look()
    for _ in range(random.randint(1, 6)):
        while (now := look()) == last:
            if child.has_ended(0.0005):
                return True
        last = now
    return child.has_ended(random.choice([0.0, 0.0, random.uniform(0, 0.005)]))


def _partials(run: Path) -> Sequence[str]:
    """Names of files and folders that are being written."""
    found = []
    for folder in (run, run / "checkpoints", run / "trunk_cache"):
        try:
            found += [name for name in os.listdir(folder) if name.endswith(".partial")]
        except OSError:
            continue
    return sorted(found)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tree(folder: Path) -> dict[str, object]:
    """Files of a folder, without what tells when they were made."""
    files = ((str(path.relative_to(folder)), path) for path in sorted(folder.rglob("*")) if path.is_file())
    return {name: path.read_bytes() for name, path in files if name not in ("manifest.json", "README.md")}
