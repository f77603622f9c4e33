"""Hostile values, rows, templates and surroundings: the verb refuses them soon and in its own words.

Where a case must work, another exit code than 0 is a failure; where it must be refused, exit code 0 is.
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
from child import Child, Ended, Limits, prge_ends
from outcome import Case, Verdict, judged, worked
from workshop import REPOSITORY, Bench, Workshop

from device_runner.evaluate import EvaluateSettings
from device_runner.inspect_bundle import InspectSettings
from device_runner.probe import ProbeSettings
from device_runner.replay import ReplaySettings
from device_runner.report import ReportSettings
from device_runner.session.settings import RunSettings

MEGABYTE = 1 << 20
Must = Literal["be refused", "work", "end"]
_LIMITS = Limits(seconds=300, processor_seconds=40)
_DIGITS = "9" * 5000
_DEEP = 100_000


@dataclass(frozen=True)
class Bounds:
    """What a refusal may take: seconds of the processor, and megabytes beyond the parent's."""

    seconds: float = 5.0
    megabytes: float = 400.0


@dataclass(frozen=True)
class Input:
    """A case: what is called, and what must become of it.

    `says`: a word that a refusal has; `never`: one that it hasn't.
    """

    name: str
    words: Sequence[object]
    must: Must = "be refused"
    bounds: Bounds = Bounds()
    limits: Limits = _LIMITS
    says: str = ""
    never: str = ""


_SOON = Bounds(1.5, 200.0)


def attack_an_input(bench: Bench, random: Random, folder: Path) -> tuple[list[Case], Counter[str]]:
    """One hostile input."""
    makers, weights = zip(*_MAKERS, strict=True)
    (make,) = random.choices(makers, weights)
    made = make(bench.workshop, random, folder)
    if not isinstance(made, Input):
        return made, Counter()
    ended = Child(made.words, made.limits, folder).wait()
    return [Case.of(made.name, _verdict(made, ended), ended)], Counter()


def _verdict(made: Input, ended: Ended) -> Verdict:
    verdict = judged(ended)
    if verdict is None:
        return Verdict.SILENT if made.must == "be refused" else Verdict.ACCEPTED
    if verdict is not Verdict.REFUSED:
        return verdict
    if made.must == "work" or made.says not in ended.output or (made.never and made.never in ended.output):
        return Verdict.UNEXPLAINED
    bounds = made.bounds
    is_greedy = ended.seconds > bounds.seconds or ended.memory > bounds.megabytes * MEGABYTE
    return Verdict.GREEDY if is_greedy else verdict


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def _run(workshop: Workshop, folder: Path, *more: object, kind: str = "decoder") -> list[object]:
    words = ["run", "--bundle", workshop.bundle(kind), *workshop.rows]
    return [*words, *"--steps 2 --threads 1 --quiet --keep-gradients --out".split(), folder / "out", *more]


def _eval(workshop: Workshop, *more: object, kind: str = "decoder") -> list[object]:
    words = ["eval", "--bundle", workshop.bundle(kind), "--data", workshop.folder / "dev.jsonl"]
    return [*words, "--threads", 1, "--task", workshop.folder / "task.yaml", *more]


# Documents


_BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))])
YAMLS: dict[str, str | bytes] = {
    "alias bomb": _BOMB,
    "merge bomb": "\n".join(
        ["m0: &m0 {a: 1}", *(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}" for n in range(1, 30))]
    ),
    "alias to itself": "a: &a [*a]",
    "date": "{name}: 2001-01-01",
    "infinity": "{name}: .inf",
    "not a number": "{name}: .nan",
    "5,000 digits": "{name}: " + _DIGITS,
    "hexadecimal of 5,000 digits": "{name}: 0x" + "f" * 5000,
    "sexagesimal": "{name}: " + ":".join(["59"] * 2000),
    "half of a pair": '{name}: "\\ud800"',
    "deep list": "{name}: " + "[" * _DEEP,
    "closed deep list": "{name}: " + "[" * _DEEP + "]" * _DEEP,
    "deep mapping": "{name}: " + "{{a: " * _DEEP,
    "deep by indentation": "\n".join(" " * n + "a:" for n in range(2000)),
    "Python object": "{name}: !!python/object/apply:os.system ['true']",
    "binary": "{name}: !!binary aaaa",
    "set": "{name}: !!set {{a, b}}",
    "long text": "{name}: " + "x" * 5_000_000,
    "long key": "x" * 5_000_000 + ": 1",
    "many keys": "\n".join(f"k{n}: {n}" for n in range(100_000)),
    "UTF-16": "{name}: 1".encode("utf-16"),
    "no UTF-8": b"name: \xff\xfe",
    "NUL": b"name: \0",
    "control characters": "{name}: \x1b[2J\x07",
    "list": "[1, 2]",
    "number": "12",
    "nothing": "",
}


def _document(workshop: Workshop, random: Random, folder: Path) -> Input:
    """A task, a configuration or a JSON document of an adapter."""
    kind, content = random.choice(list(YAMLS.items()))
    where = random.choice(["task", "config", "task of eval", "adapter_config.json", "hashes.json"])
    names = {"config": ["steps", "learning_rate", "lengths", "quiet"], "hashes.json": ["a"]}
    name = random.choice(names.get(where, ["name", "template", "label_words", "columns", "metric"]))
    if isinstance(content, str):
        content = content.replace("{name}", name).replace("{{", "{").replace("}}", "}")
    label = f"{where}: {kind}"
    if where.endswith("json"):
        adapter = Path(shutil.copytree(workshop.bundle("decoder") / "adapter", folder / "adapter"))
        _write(adapter / where, content)
        return Input(label, _eval(workshop, "--adapter", adapter), bounds=_SOON)
    path = _write(folder / "bad.yaml", content)
    if where == "config":
        # An empty file is no setting at all.
        must: Must = "end" if kind == "nothing" else "be refused"
        return Input(label, _run(workshop, folder, "--config", path), must, bounds=_SOON)
    words = _eval(workshop, "--task", path) if "eval" in where else _run(workshop, folder, "--task", path)
    return Input(label, words, bounds=_SOON)


# Chat templates


TEMPLATES: dict[str, str] = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "growing text": "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}"
    "{% endfor %}{{ ns.t }}",
    "repeated text": "{{ 'x' * 10**10 }}",
    "large power": "{{ 10**10**10 }}",
    "large shift": "{{ (2 ** 40) ** (2 ** 20) }}",
    "lipsum": "{{ lipsum(100000) }}",
    "indented JSON": "{{ messages | tojson(indent=10**9) }}",
    "padded text": "{{ '%1000000000d' % 1 }}",
    "formatted text": "{{ '{:>1000000000}'.format('x') }}",
    "centred text": "{{ 'x' | center(10**9) }}",
    "indented text": "{{ 'x\\nx' | indent(10**9) }}",
    "joined text": "{{ range(99999) | join('x' * 99999) }}",
    "replaced text": "{{ ('x' * 99999) | replace('x', 'x' * 99999) }}",
    "long list": "{% set a = [0] * 10**9 %}{{ a | length }}",
    "deep list": "{% set ns = namespace(t=[]) %}{% for i in range(99999) %}{% set ns.t = [ns.t] %}"
    "{% endfor %}{{ ns.t }}",
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "long source": "x" * 20_000_000,
    "many statements": "{{ 1 }}" * 500_000,
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "broad recursion": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "escape by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "escape by attr": "{{ messages | map(attribute='__class__') | list }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "layout of time": "{{ strftime_now('%' ~ '9' * 9 ~ 'd') }}",
    "raised": "{{ raise_exception('x' * 10**7) }}",
    "syntax": "{% for %}",
    "undefined": "{{ nothing.at.all }}",
    "half of a pair": "{{ '\\ud800' }}",
    "terminal": "{{ raise_exception('\\x1b[2J') }}",
    "no characters": "",
}


def _template(workshop: Workshop, random: Random, folder: Path) -> Input:
    """A bundle whose chat template is hostile, and whose hashes fit."""
    kind, source = random.choice(list(TEMPLATES.items()))
    bundle = Path(shutil.copytree(workshop.bundle("decoder"), folder / "bundle"))
    _write(bundle / "tokenizer" / "chat_template.jinja", source)
    damage.rehash_bundle(bundle)
    words = ["--bundle", bundle, "--threads", 1]
    rows = workshop.folder / "chat.jsonl"
    if random.random() < 0.5:
        words = ["run", *words, "--train", rows, "--steps", 1, "--quiet", "--out", folder / "out"]
    else:
        words = ["eval", *words, "--data", rows]
    return Input(f"chat template: {kind}", words, "end", bounds=Bounds(30.0, 700.0))


# Numbers


def _manifest(workshop: Workshop, random: Random, folder: Path) -> Input:
    """A manifest with a large number, whose hash fits."""
    kind = random.choice(workshop.kinds)
    bundle = Path(shutil.copytree(workshop.bundle(kind), folder / "bundle"))
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
    words: list[object] = ["inspect", bundle]
    if verb != "inspect":
        words = _run(workshop, folder) if verb == "run" else _eval(workshop)
        words[2] = bundle
    # Some numbers are said and not used, such as a window that is longer than all rows.
    return Input(f"manifest: {name}", words, "end", bounds=_SOON)


_VERBS: dict[str, tuple[type[Any], Callable[[Workshop, Path], list[object]]]] = {
    "run": (RunSettings, _run),
    "eval": (EvaluateSettings, lambda workshop, _: _eval(workshop)),
    "inspect": (InspectSettings, lambda workshop, _: ["inspect", workshop.bundle("decoder")]),
    "probe": (
        ProbeSettings,
        lambda workshop, _: [
            *("probe", "--bundle", workshop.bundle("decoder"), "--data", workshop.folder / "dev.jsonl"),
            *("--task", workshop.folder / "task.yaml", "--batches", 1, "--epsilons", "0.01", "--threads", 1),
        ],
    ),
    "replay": (ReplaySettings, lambda _, folder: ["replay", folder / "nothing", "--out", folder / "out"]),
    "report": (ReportSettings, lambda _, folder: ["report", folder / "nothing"]),
}
# Large ones only take long, as they should.
_TAKES_LONG = frozenset({"steps", "batches"})
_ODD = ["", *"x nan inf -inf 1e999 1e308 -1e308 1e-320 -1 -0 0 0.5 1_0 ٣ 0x10 1e3 None null true".split()]
_ODD += ["[1]", "{}", "\x1b[2J", "\udcff", " ", "--", "=", "../.."]
_LARGE = ["1000000000", "1000000000000", str(2**31), str(2**63), str(2**64), str(10**30), _DIGITS]


def _flag(workshop: Workshop, random: Random, folder: Path) -> Input:
    """A flag of a verb with a value that it can't have, or one that nobody gives."""
    verb = random.choice([*_VERBS, "run", "run", "eval"])
    settings, make = _VERBS[verb]
    name = random.choice([item.name for item in dataclasses.fields(settings)])
    values = _ODD if name in _TAKES_LONG else [*_ODD, *_LARGE]
    flag, value = f"--{name.replace('_', '-')}", random.choice(values)
    given = random.choice([[f"{flag}={value}"], [flag, value], [flag, value, value], [flag]])
    return Input(f"{verb}: {flag}", [*make(workshop, folder), *given], "end", bounds=Bounds(20.0, 500.0))


def _bounds(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Numbers that no run can have."""
    choices = ["--calls 1000000000", f"--seed {2**64}", "--seed -1", "--momentum 1", "--beta2 1"]
    choices += ["--threads 1000000", "--head-folds 1000000000", "--learning-rate inf", "--learning-rate nan"]
    choices += ["--epsilon 0", f"--steps {_DIGITS}", "--divergence-ratio nan", "--clip inf"]
    choices += ["--queries 1000000000", "--batch-size 0", "--copies 1000000000000", "--warmup 1000000000"]
    chosen = random.choice(choices)
    words = _run(workshop, folder, *chosen.split())
    return Input(f"bounds: {chosen[:40]}", words, bounds=_SOON)


# Rows


def _labelled(text: object, label: object = 0) -> str:
    return json.dumps({"text": text, "label": label}) + "\n"


_OF_OTHER_KINDS: list[object] = [None, [], {}, True, 1.5]
ROWS: dict[str, tuple[str, Callable[[], str | bytes]]] = {
    "one row of 10 MB": ("jsonl", lambda: _labelled("aa bb " * (10 * MEGABYTE // 6)) + _labelled("b", 1)),
    "one word of 10 MB": ("jsonl", lambda: _labelled("x" * (10 * MEGABYTE)) + _labelled("b", 1)),
    "one row of 10 MB as csv": ("csv", lambda: f'text,label\n"{"aa bb " * (10 * MEGABYTE // 6)}",0\nb,1\n'),
    "many rows": ("jsonl", lambda: _labelled("aa") * 20_000 + _labelled("b", 1)),
    "deep": ("jsonl", lambda: '{"text": ' + "[" * _DEEP + "]" * _DEEP + ', "label": 0}\n'),
    "open and deep": ("jsonl", lambda: '{"text": ' + "[" * _DEEP),
    "5,000 digits": ("jsonl", lambda: '{"text": "a", "label": ' + _DIGITS + "}\n"),
    "not a number": ("jsonl", lambda: '{"text": "a", "label": NaN}\n'),
    "infinity": ("jsonl", lambda: '{"text": "a", "label": 1e999}\n'),
    "half of a pair": ("jsonl", lambda: '{"text": "\\ud800", "label": 0}\n{"text": "b", "label": 1}\n'),
    "NUL": ("jsonl", lambda: '{"text": "a\\u0000", "label": 0}\n{"text": "b", "label": 1}\n'),
    "no UTF-8": ("jsonl", lambda: b'{"text": "\xff", "label": 0}\n'),
    "UTF-16": ("jsonl", lambda: _labelled("a").encode("utf-16")),
    "byte order mark": ("jsonl", lambda: b"\xef\xbb\xbf" + (_labelled("a") + _labelled("b", 1)).encode()),
    "a list": ("jsonl", lambda: "[1, 2]\n"),
    "a text": ("jsonl", lambda: '"a"\n'),
    "nothing": ("jsonl", lambda: ""),
    "empty lines": ("jsonl", lambda: "\n\n\n"),
    "empty text": ("jsonl", lambda: _labelled("") + _labelled("b", 1)),
    "labels of other kinds": (
        "jsonl",
        lambda: "".join(_labelled("a", label) for label in _OF_OTHER_KINDS),
    ),
    "text of other kinds": ("jsonl", lambda: "".join(_labelled(text) for text in _OF_OTHER_KINDS)),
    "columns doubled": ("csv", lambda: "text,text,label\na,b,0\n"),
    "columns missing": ("csv", lambda: "a\n1\n"),
    "rows too long": ("csv", lambda: "text,label\na,0,1,2\nb\n"),
    "open quotes": ("csv", lambda: 'text,label\n"a,0\n' * 1000),
    "many columns": ("tsv", lambda: "\t".join(f"c{n}" for n in range(100_000)) + "\n"),
    "NUL as csv": ("csv", lambda: "text,label\na\0,0\n"),
    "another ending": ("parquet", lambda: b"PAR1"),
}


def _rows(workshop: Workshop, random: Random, folder: Path) -> Input:
    """A file of odd rows."""
    kind, (ending, make) = random.choice(list(ROWS.items()))
    path = _write(folder / f"rows.{ending}", make())
    # With the row itself, which a reader may hold twice, and what its tokens take.
    bounds = Bounds(30.0, 250.0)
    if random.random() < 0.5:
        return Input(f"rows of eval: {kind}", [*_eval(workshop), "--data", path], "end", bounds=bounds)
    return Input(f"rows of run: {kind}", _run(workshop, folder, "--train", path), "end", bounds=bounds)


# Surroundings


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
    """Standard files that refuse: they end no training, and get no journal's number."""
    refuse = random.choice([_close, _full, _unread])
    numbers = random.choice([[1], [2], [1, 2], [0, 1, 2]])
    words = [word for word in _run(workshop, folder) if word != "--quiet"]
    ended = Child(words, _LIMITS, prepare=partial(refuse, numbers)).wait()
    whole = prge_ends(["replay", folder / "out", "--out", folder / "replayed"])
    return [Case.of(f"standard files: {refuse.__name__[1:]} {numbers}", worked(ended, whole), ended)]


def _full_disk(workshop: Workshop, random: Random, folder: Path) -> list[Case]:
    """A disk that is full on the way: the run is told so, and goes on when there is room."""
    words = [*_run(workshop, folder, "--checkpoint-every", 1), "--steps", 6]
    whole = prge_ends([*words, "--out", folder / "whole"])
    small = random.choice([0, random.randrange(20_000), random.randrange(4000)])
    out = folder / "disk" / "out"
    out.parent.mkdir()
    is_mounted = os.geteuid() == 0 and random.random() < 0.5 and _mounted(out.parent, 12288 + 4 * small)
    limits = dataclasses.replace(_LIMITS, file_bytes=None if is_mounted else small)
    try:
        ended = Child([*words, "--out", out], limits).wait()
        verdict = judged(ended)
        if verdict is Verdict.UNEXPLAINED and ended.code == 2 and not is_mounted:
            verdict = Verdict.REFUSED  # the file of its output is limited too
        if is_mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", str(out.parent)], check=True)
        again = ["run", "--resume", out] if (out / "config.yaml").is_file() else [*words, "--out", out]
        resumed = prge_ends(again)
        if verdict in (None, Verdict.REFUSED):
            verdict, ended = worked(resumed), ended if resumed.code == 0 else resumed
        if verdict is Verdict.ACCEPTED and _weights(folder / "whole") != _weights(out):
            verdict = Verdict.DIFFERENT
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(out.parent)], check=True)
    if whole.code:
        verdict, ended = Verdict.UNEXPLAINED, whole
    name = "full disk" if is_mounted else "a limit on the size of files"
    return [Case.of(name, verdict, ended, resumed.tail)]


def _mounted(folder: Path, size: int) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _weights(run: Path) -> bytes:
    path = run / "final" / "adapter_model.safetensors"
    return path.read_bytes() if path.is_file() else b""


def _little_memory(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Memory that runs out is said as that."""
    kind = random.choice(workshop.kinds)
    memory = random.randrange(MEGABYTE, 90 * MEGABYTE)
    limits = dataclasses.replace(_LIMITS, memory=memory)
    name = f"little memory: {kind}"
    words = _run(workshop, folder, kind=kind)
    return Input(name, words, "end", limits=limits, says="memory", never="damaged", bounds=Bounds(20.0))


def _names(workshop: Workshop, random: Random, folder: Path) -> list[Case]:
    """Folders whose names are not plain, in a process of its own: its encoding is chosen at the start."""
    odd = ["grün", "-x", "--out", "a b", "a\nb", "日本", "'", '"', "$(x)", "%s", "{}", "a=b", "x" * 200]
    name = random.choice(odd)
    environment: Mapping[str, str] = {**os.environ, "LC_ALL": "C", "PYTHONPATH": str(REPOSITORY)}
    began = [str(word) for word in _run(workshop, folder)]
    began[began.index("--out") : began.index("--out") + 2] = [f"--out={name}"]
    calls = [began, ["run", "--resume", f"./{name}"], ["replay", f"./{name}", f"--out={name}-again"]]
    cases = []
    for words in calls:
        command = [sys.executable, "-m", "prge.cli", *words]
        done = subprocess.run(command, capture_output=True, cwd=folder, env=environment, timeout=300)
        output = (done.stdout + done.stderr).decode(errors="replace")
        ended = Ended(tuple(words), done.returncode, output)
        cases.append(Case.of(f"name of a folder: {words[0]}", worked(ended), ended))
    return cases


def _places(workshop: Workshop, random: Random, folder: Path) -> Input:
    """Places where no run can be."""
    _write(folder / "file", "kept")
    (folder / "nowhere").symlink_to(folder / "missing" / "place")
    os.mkfifo(folder / "pipe")
    places = ["/dev/null", "/proc/self/out", "/dev/full/out", folder / "file", folder / "file" / "out"]
    places += [folder / "nowhere", folder / "pipe", folder / ("x" * 300), folder / ("y/" * 3000), ""]
    return Input("place of a run", [*_run(workshop, folder), f"--out={random.choice(places)}"], "be refused")


def _two_at_once(workshop: Workshop, random: Random, folder: Path) -> list[Case]:
    """Two processes that begin, or go on with, the same run: one has it, the other is told so."""
    words = [*_run(workshop, folder), "--steps", 12, "--checkpoint-every", 1]
    resume = ["run", "--resume", folder / "out"]
    ended, resumed = (
        [child.wait() for child in [Child(each, _LIMITS) for _ in range(2)]] for each in (words, resume)
    )
    replayed = prge_ends(["replay", folder / "out", "--out", folder / "replayed"])
    calls = [*ended, *resumed, replayed]
    cases = [Case.of("two processes", judged(each) or Verdict.ACCEPTED, each) for each in calls]
    if replayed.code or not any(each.code == 0 for each in ended):
        cases.append(dataclasses.replace(cases[-1], verdict=Verdict.DIFFERENT))
    return cases


_MAKERS: list[tuple[Callable[[Workshop, Random, Path], Input | list[Case]], int]] = [
    (_document, 12),
    (_template, 8),
    (_manifest, 6),
    (_flag, 16),
    (_bounds, 4),
    (_rows, 8),
    (_streams, 4),
    (_full_disk, 4),
    (_little_memory, 4),
    (_names, 1),
    (_places, 2),
    (_two_at_once, 1),
]
