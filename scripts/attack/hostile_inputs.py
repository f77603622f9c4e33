"""Hostile values, rows, templates and environments: verbs must refuse them soon with their own message.

A case that must work fails with a nonzero exit code; a case that must be refused fails with exit code 0.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import damage
import hostile_parquet
from child import Child, Limits, ProcessResult, run_prge
from hostile_tokenizers import change_tokenizer
from outcome import Case, Findings, Verdict, judge, judge_success
from tables import TABLES, random_entry
from workshop import REPOSITORY, Bench, Workshop, enlarge_disk, mount_disk, unmount_disk

from device_runner.inspect_bundle import InspectSettings
from device_runner.replay import ReplaySettings
from device_runner.report import ReportSettings
from device_runner.session.settings import EvaluateSettings, RunSettings

MEGABYTE = 1 << 20
Must = Literal["be refused", "work", "end"]
_LIMITS = Limits(seconds=300, processor_seconds=40)


@dataclass(frozen=True)
class Bounds:
    """Maximum processor seconds of a refusal, and maximum memory of a call beyond its parent's."""

    seconds: float = 5.0
    megabytes: float = 400.0


@dataclass(frozen=True)
class Input:
    """A command line and its expected outcome.

    `says` is a text that a refusal must contain, `never` one that it must not contain.
    """

    name: str
    arguments: Sequence[object]
    must: Must = "be refused"
    bounds: Bounds = Bounds()
    limits: Limits = _LIMITS
    says: str = ""
    never: str = ""


_SOON = Bounds(1.5, 200.0)


def attack_an_input(bench: Bench, random: Random, folder: Path) -> Findings:
    """Run one hostile input."""
    makers, weights = zip(*_MAKERS, strict=True)
    (make,) = random.choices(makers, weights)
    case_input = make(bench.workshop, random, folder)
    if not isinstance(case_input, Input):
        return case_input, Counter()
    result = Child(case_input.arguments, case_input.limits, folder).wait()
    return [Case.of(case_input.name, _verdict(case_input, result), result)], Counter()


def _verdict(case_input: Input, result: ProcessResult) -> Verdict:
    verdict = judge(result)
    takes_too_much = result.memory > case_input.bounds.megabytes * MEGABYTE
    if verdict is None:
        if case_input.must == "be refused":
            return Verdict.SILENT
        return Verdict.GREEDY if takes_too_much else Verdict.ACCEPTED
    if verdict is not Verdict.REFUSED:
        return verdict
    if (
        case_input.must == "work"
        or case_input.says not in result.output
        or (case_input.never and case_input.never in result.output)
    ):
        return Verdict.UNEXPLAINED
    return Verdict.GREEDY if takes_too_much or result.seconds > case_input.bounds.seconds else verdict


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def _run(workshop: Workshop, folder: Path, *more: object, bundle_type: str = "decoder") -> list[object]:
    arguments = ["run", "--bundle", workshop.bundle(bundle_type), *workshop.rows]
    return [
        *arguments,
        *"--steps 2 --threads 1 --quiet --keep-gradients --out".split(),
        folder / "out",
        *more,
    ]


def _eval(workshop: Workshop, *more: object) -> list[object]:
    arguments = ["eval", "--bundle", workshop.bundle("decoder"), "--data", workshop.folder / "dev.jsonl"]
    return [*arguments, "--threads", 1, "--task", workshop.folder / "task.yaml", *more]


_MERGES = (f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}" for n in range(1, 30))
DOCUMENTS: dict[str, Any] = {
    **TABLES["documents"],
    "alias bomb": "\n".join(
        ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    ),
    "merge bomb": "\n".join(["m0: &m0 {a: 1}", *_MERGES]),
    "deep by indentation": "\n".join(" " * n + "a:" for n in range(2000)),
    "many keys": "\n".join(f"k{n}: {n}" for n in range(100_000)),
    "UTF-16": "{name}: 1".encode("utf-16"),
    "no UTF-8": b"name: \xff\xfe",
}


def _document(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Write a hostile task, configuration or JSON file of an adapter."""
    case_name, content = random_entry(random, DOCUMENTS)
    where = random.choice(["task", "config", "task of eval", "adapter_config.json", "hashes.json"])
    names = {"config": ["steps", "learning_rate", "lengths", "quiet"], "hashes.json": ["a"]}
    name = random.choice(names.get(where, ["name", "template", "label_words", "columns", "metric"]))
    if isinstance(content, str):
        content = content.replace("{name}", name)
    label = f"{where}: {case_name}"
    if where.endswith("json"):
        adapter = Path(shutil.copytree(workshop.bundle("decoder") / "adapter", folder / "adapter"))
        _write(adapter / where, content)
        return Input(label, _eval(workshop, "--adapter", adapter), bounds=_SOON)
    path = _write(folder / "bad.yaml", content)
    if where == "config":
        # An empty file has no settings and is valid.
        must: Must = "end" if case_name == "nothing" else "be refused"
        return Input(label, _run(workshop, folder, "--config", path), must, bounds=_SOON)
    arguments = _eval(workshop, "--task", path) if "eval" in where else _run(workshop, folder, "--task", path)
    return Input(label, arguments, bounds=_SOON)


def _template(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Write a bundle with a hostile chat template and valid hashes."""
    case_name, source = random_entry(random, TABLES["templates"])
    bundle = Path(shutil.copytree(workshop.bundle("decoder"), folder / "bundle"))
    _write(bundle / "tokenizer" / "chat_template.jinja", source)
    damage.rehash_bundle(bundle)
    arguments = ["--bundle", bundle, "--threads", 1]
    rows = workshop.folder / "chat.jsonl"
    if random.random() < 0.5:
        arguments = ["run", *arguments, "--train", rows, "--steps", 1, "--quiet", "--out", folder / "out"]
    else:
        arguments = ["eval", *arguments, "--data", rows]
    return Input(f"chat template: {case_name}", arguments, "end", bounds=Bounds(30.0, 700.0))


def _tokenizer(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Write a bundle with a hostile tokenizer.json and valid hashes."""
    bundle = Path(shutil.copytree(workshop.bundle("decoder"), folder / "bundle"))
    mutation = change_tokenizer(bundle / "tokenizer" / "tokenizer.json", random)
    damage.rehash_bundle(bundle)
    arguments: list[object] = ["inspect", bundle]
    if (verb := random.choice(["run", "eval", "eval", "generate", "inspect"])) == "generate":
        arguments = ["generate", "--bundle", bundle, "--prompt", "aa bb", "--max-tokens", 3, "--threads", 1]
    elif verb != "inspect":
        arguments = _run(workshop, folder) if verb == "run" else _eval(workshop)
        arguments[2] = bundle
    return Input(f"tokenizer: {mutation}", arguments, "end", bounds=Bounds(30.0, 700.0))


def _parquet(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Write rows in a hostile parquet file."""
    case_name, (write, is_refused) = random_entry(random, hostile_parquet.MUTATIONS)
    path = folder / "rows.parquet"
    write(path, random)
    is_eval = random.random() < 0.5
    arguments = _eval(workshop, "--data", path) if is_eval else _run(workshop, folder, "--train", path)
    # Rows that may be wanted may need their memory.
    bounds = Bounds(40.0, 400.0 if is_refused else 1000.0)
    return Input(f"parquet: {case_name}", arguments, "be refused" if is_refused else "end", bounds=bounds)


def _manifest(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Write a bundle whose manifest has a large number and a valid hash."""
    bundle_type = random.choice(workshop.bundle_types)
    bundle = Path(shutil.copytree(workshop.bundle(bundle_type), folder / "bundle"))
    manifest = json.loads((bundle / "manifest.json").read_text())
    chain = manifest["chain"]
    parts = [part for name in ("modules", "tables", "blocks") for part in chain[name]]
    block = random.choice([chain, chain["bounds"], manifest["tokenizer"], random.choice(parts)])
    names = [name for name, value in block.items() if type(value) is int] or ["batch"]
    name = random.choice(names)
    block[name] = random.choice([10**12, 2**31, 2**63, 10**18, -1, -(10**12)])
    _write(bundle / "manifest.json", json.dumps(manifest))
    damage.rehash_bundle(bundle)
    verb = random.choice(["run", "eval", "inspect"])
    arguments: list[object] = ["inspect", bundle]
    if verb != "inspect":
        arguments = _run(workshop, folder) if verb == "run" else _eval(workshop)
        arguments[2] = bundle
    # Some numbers are stored and not used, such as a window longer than all rows.
    return Input(f"manifest: {name}", arguments, "end", bounds=_SOON)


_VERBS: dict[str, tuple[type[Any], Callable[[Workshop, Path], list[object]]]] = {
    "run": (RunSettings, _run),
    "eval": (EvaluateSettings, lambda workshop, _: _eval(workshop)),
    "inspect": (InspectSettings, lambda workshop, _: ["inspect", workshop.bundle("decoder")]),
    "replay": (ReplaySettings, lambda _, folder: ["replay", folder / "nothing", "--out", folder / "out"]),
    "report": (ReportSettings, lambda _, folder: ["report", folder / "nothing"]),
}
# Large values of these are valid and only take long.
_TAKES_LONG = frozenset({"steps", "batches"})


def _flag(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Give a flag of a verb an impossible or unusual value."""
    verb = random.choice([*_VERBS, "run", "run", "eval"])
    settings, make = _VERBS[verb]
    name = random.choice([item.name for item in dataclasses.fields(settings)])
    values = TABLES["values"] + ([] if name in _TAKES_LONG else TABLES["large"])
    flag, value = f"--{name.replace('_', '-')}", random.choice(values)
    given = random.choice([[f"{flag}={value}"], [flag, value], [flag, value, value], [flag]])
    return Input(f"{verb}: {flag}", [*make(workshop, folder), *given], "end", bounds=Bounds(20.0, 500.0))


def _bounds(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Give a flag a number that is out of bounds."""
    chosen = random.choice(TABLES["bounds"])
    arguments = _run(workshop, folder, *chosen.split())
    return Input(f"bounds: {chosen[:40]}", arguments, bounds=_SOON)


ROWS: list[tuple[str, str, Any]] = [
    *(
        (ending, case_name, content)
        for ending, table in TABLES["rows"].items()
        for case_name, content in table.items()
    ),
    ("jsonl", "no UTF-8", b'{"text": "\xff", "label": 0}\n'),
    ("jsonl", "UTF-16", '{"text": "a", "label": 0}\n'.encode("utf-16")),
    ("tsv", "many columns", "\t".join(f"c{n}" for n in range(100_000)) + "\n"),
]


def _rows(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Write a file with unusual rows."""
    ending, case_name, content = random.choice(ROWS)
    path = _write(folder / f"rows.{ending}", content)
    # A reader may hold a row twice, and its tokens need memory too.
    bounds = Bounds(30.0, 250.0)
    if random.random() < 0.5:
        return Input(f"rows of eval: {case_name}", [*_eval(workshop), "--data", path], "end", bounds=bounds)
    return Input(f"rows of run: {case_name}", _run(workshop, folder, "--train", path), "end", bounds=bounds)


def _close(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)


def _full(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def _unread(numbers: Sequence[int]) -> None:
    reading, writing = os.pipe()
    for number in numbers:
        os.dup2(writing, number)
    os.close(reading)


def _streams(workshop: Workshop, random: Random, folder: Path) -> list[Case]:
    """Train with standard streams that fail, which must neither end the run nor reach the journal's file."""
    refuse = random.choice([_close, _full, _unread])
    numbers = random.choice([[1], [2], [1, 2], [0, 1, 2]])
    arguments = [word for word in _run(workshop, folder) if word != "--quiet"]
    result = Child(arguments, _LIMITS, prepare=partial(refuse, numbers)).wait()
    whole = run_prge(["replay", folder / "out", "--out", folder / "replayed"])
    return [Case.of(f"standard files: {refuse.__name__[1:]} {numbers}", judge_success(result, whole), result)]


def _full_disk(workshop: Workshop, random: Random, folder: Path) -> list[Case]:
    """Fill the disk during a run, which must report it, and resume when there is room."""
    arguments = [*_run(workshop, folder, "--save-steps", 1), "--steps", 6]
    whole = run_prge([*arguments, "--out", folder / "whole"])
    small = random.choice([0, random.randrange(20_000), random.randrange(4000)])
    out = folder / "disk" / "out"
    out.parent.mkdir()
    is_mounted = random.random() < 0.5 and mount_disk(out.parent, 12288 + 4 * small)
    limits = dataclasses.replace(_LIMITS, file_bytes=None if is_mounted else small)
    try:
        result = Child([*arguments, "--out", out], limits).wait()
        verdict = judge(result)
        if verdict is Verdict.UNEXPLAINED and result.code == 2 and not is_mounted:
            verdict = Verdict.REFUSED  # the limit applies to the output file too
        if is_mounted:
            enlarge_disk(out.parent)
        again = ["run", "--resume", out] if (out / "config.yaml").is_file() else [*arguments, "--out", out]
        resumed = run_prge(again)
        if verdict in (None, Verdict.REFUSED):
            verdict, result = judge_success(resumed), result if resumed.code == 0 else resumed
        if verdict is Verdict.ACCEPTED and _weights(folder / "whole") != _weights(out):
            verdict = Verdict.DIFFERENT
    finally:
        if is_mounted:
            unmount_disk(out.parent)
    if whole.code:
        verdict, result = Verdict.UNEXPLAINED, whole
    name = "full disk" if is_mounted else "a limit on the size of files"
    return [Case.of(name, verdict, result, resumed.tail)]


def _weights(run: Path) -> bytes:
    path = run / "final" / "adapter_model.safetensors"
    return path.read_bytes() if path.is_file() else b""


def _little_memory(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Run with too little memory, which the message must report."""
    bundle_type = random.choice(workshop.bundle_types)
    memory = random.randrange(MEGABYTE, 90 * MEGABYTE)
    limits = dataclasses.replace(_LIMITS, memory=memory)
    name = f"little memory: {bundle_type}"
    arguments = _run(workshop, folder, bundle_type=bundle_type)
    return Input(name, arguments, "end", limits=limits, says="memory", never="damaged", bounds=Bounds(20.0))


def _names(workshop: Workshop, random: Random, folder: Path) -> list[Case]:
    """Train in folders with unusual names, in a process of its own, whose encoding is chosen at its start."""
    name = random.choice(TABLES["names"])
    environment: Mapping[str, str] = {**os.environ, "LC_ALL": "C", "PYTHONPATH": str(REPOSITORY)}
    began = [str(word) for word in _run(workshop, folder)]
    began[began.index("--out") : began.index("--out") + 2] = [f"--out={name}"]
    calls = [began, ["run", "--resume", f"./{name}"], ["replay", f"./{name}", f"--out={name}-again"]]
    cases = []
    for arguments in calls:
        command = [sys.executable, "-m", "prge.cli.main", *arguments]
        done = subprocess.run(command, capture_output=True, cwd=folder, env=environment, timeout=300)
        output = (done.stdout + done.stderr).decode(errors="replace")
        result = ProcessResult(tuple(arguments), done.returncode, output)
        cases.append(Case.of(f"name of a folder: {arguments[0]}", judge_success(result), result))
    return cases


def _bad_paths(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Give a path that can't hold a run."""
    _write(folder / "file", "kept")
    (folder / "nowhere").symlink_to(folder / "missing" / "place")
    os.mkfifo(folder / "pipe")
    path = random.choice(TABLES["places"]).replace("{}", str(folder))
    return Input("place of a run", [*_run(workshop, folder), f"--out={path}"], "be refused")


def _two_at_once(workshop: Workshop, random: Random, folder: Path) -> list[Case]:
    """Start and resume the same run in two processes: one gets it, the other is refused."""
    arguments = [*_run(workshop, folder), "--steps", 12, "--save-steps", 1]
    resume = ["run", "--resume", folder / "out"]
    result, resumed = (
        [child.wait() for child in [Child(each, _LIMITS) for _ in range(2)]] for each in (arguments, resume)
    )
    replayed = run_prge(["replay", folder / "out", "--out", folder / "replayed"])
    calls = [*result, *resumed, replayed]
    cases = [Case.of("two processes", judge(each) or Verdict.ACCEPTED, each) for each in calls]
    if replayed.code or not any(each.code == 0 for each in result):
        cases.append(dataclasses.replace(cases[-1], verdict=Verdict.DIFFERENT))
    return cases


_MAKERS: list[tuple[Callable[[Workshop, Random, Path], Input | list[Case]], int]] = [
    (_document, 12),
    (_template, 8),
    (_manifest, 6),
    (_flag, 16),
    (_bounds, 4),
    (_rows, 8),
    (_tokenizer, 10),
    (_parquet, 6),
    (_streams, 4),
    (_full_disk, 4),
    (_little_memory, 4),
    (_names, 1),
    (_bad_paths, 2),
    (_two_at_once, 1),
]
