"""Damaged, missing, linked and hostile files, each read by the verb that reads it.

A case passes if the verb refuses in its own words, or if its result is that of the undamaged file. Where
nothing says what a file must be (rows that are scored, a bundle whose every hash was made to fit), another
result is another input's; everywhere else it is a failure, as are signals, tracebacks and hanging.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import damage
from child import Limits, prge_ends
from outcome import Case, Verdict, command_line, judged
from workshop import Bench

LIMITS = Limits(seconds=300, processor_seconds=30, memory=1 << 30)
_KINDS = ["decoder", "decoder", "encoder", "upper", "quantized"]
_RUN_KINDS = ["decoder", "decoder", "encoder", "upper"]
_FOREIGN = ["step-000004 (copy)", "step-000010-mine", "step-10", "notes"]


@dataclass
class Scene:
    """Folders of one case: what is damaged lies in `folder`, everything else is the bench's own."""

    bench: Bench
    kind: str
    folder: Path

    def copy(self, name: str) -> Path:
        """A copy of the bench's `bundle`, `finished`, `unfinished`, `adapter`, `dev.jsonl` or `task.yaml`."""
        source, target = self.bench.original(self.kind, name), self.folder / name
        if not target.exists():
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        return target

    def either(self, name: str) -> Path:
        """The case's copy if there is one, else the original."""
        return self.folder / name if (self.folder / name).exists() else self.bench.original(self.kind, name)


Words = Callable[[Scene], list[object]]
Result = Callable[[Scene], object]


def _evaluation(scene: Scene) -> object:
    found = json.loads((scene.folder / "eval.json").read_text())
    return {name: found[name] for name in ("loss", "accuracy", "examples") if name in found}


def _final(name: str) -> Result:
    return lambda scene: {
        path.name: path.read_bytes() for path in (scene.folder / name).glob("*.safetensors")
    }


@dataclass(frozen=True)
class Use:
    """How a verb reads what was damaged, and what its result is; None where it has none to compare.

    `needs` is copied beside what is damaged.
    """

    words: Words
    result: Result | None = None
    needs: str = ""


def _eval(scene: Scene, *more: object) -> list[object]:
    words = ["eval", "--bundle", scene.either("bundle"), "--data", scene.either("dev.jsonl"), "--threads", 1]
    if scene.kind == "encoder" and not more:  # whose head is a run's
        more = ("--adapter", scene.bench.original(scene.kind, "finished"))
    return [*words, "--task", scene.either("task.yaml"), "--json", scene.folder / "eval.json", *more]


def _begin(scene: Scene) -> list[object]:
    words = ["run", "--bundle", scene.either("bundle"), "--train", scene.either("train.jsonl"), "--quiet"]
    words += [
        "--task",
        scene.either("task.yaml"),
        "--steps",
        2,
        "--threads",
        1,
        "--out",
        scene.folder / "new",
    ]
    return [*words, "--adapter", scene.either("adapter")] if (scene.folder / "adapter").exists() else words


def _resume(scene: Scene) -> list[object]:
    given = [
        word
        for name, flag in (("bundle", "--bundle"), ("train.jsonl", "--train"), ("task.yaml", "--task"))
        if (scene.folder / name).exists() or (scene.folder / name).is_symlink()
        for word in (flag, scene.folder / name)
    ]
    return ["run", "--resume", scene.folder / "unfinished", "--quiet", *given]


EVAL = Use(_eval, _evaluation)
EVAL_RUN = Use(lambda scene: _eval(scene, "--adapter", scene.folder / "finished"), _evaluation, "finished")
EVAL_ADAPTER = Use(lambda scene: _eval(scene, "--adapter", scene.folder / "adapter"), _evaluation, "adapter")
BEGIN = Use(_begin, _final("new/final"))
RESUME = Use(_resume, _final("unfinished/final"), "unfinished")
RESUME_FINISHED = Use(
    lambda scene: ["run", "--resume", scene.folder / "finished", "--quiet"],
    _final("finished/final"),
    "finished",
)
REPLAY = Use(
    lambda scene: ["replay", scene.folder / "finished", "--out", scene.folder / "replayed"],
    _final("replayed"),
    "finished",
)
INSPECT = Use(lambda scene: ["inspect", scene.folder / "bundle"])
REPORT = Use(
    lambda scene: ["report", scene.folder / "finished", "--out", scene.folder / "report.html"],
    None,
    "finished",
)
PROBE = Use(
    lambda scene: [
        *("probe", "--bundle", scene.either("bundle"), "--data", scene.either("dev.jsonl"), "--threads", 1),
        *("--task", scene.either("task.yaml"), "--batches", 1, "--epsilons", "0.01"),
    ]
)


@dataclass(frozen=True)
class Target:
    """A file, how it is damaged, and who reads it.

    `crafted`: ways that leave every checksum right. `is_judged`: something says what the file must be.
    """

    top: str
    pattern: str
    uses: tuple[Use, ...]
    crafted: tuple[damage.Way, ...] = ()
    is_judged: bool = True

    def files(self, top: Path) -> list[Path]:
        """The files of a case that the target means."""
        return sorted(
            path for path in ([top] if not self.pattern else top.glob(self.pattern)) if path.is_file()
        )


def _then_rehash_bundle(way: damage.Way) -> damage.Way:
    def both(path: Path, random: Random) -> None:
        bundle = next(parent for parent in path.parents if (parent / "manifest.json").exists())
        way(path, random)
        if path.parent.name == "adapter":
            damage.rehash_folder(path.parent)
        damage.rehash_bundle(bundle)

    return both


def _then_rehash_folder(way: damage.Way) -> damage.Way:
    def both(path: Path, random: Random) -> None:
        way(path, random)
        damage.rehash_folder(path.parent)

    return both


def _bytes_of(*names: str) -> tuple[damage.Way, ...]:
    return tuple(damage.WAYS[name] for name in names)


_BYTES = _bytes_of("one bit", "eight bits", "noise", "zeros", "cut", "cut out", "empty", "grown")
_JSON = (damage.mutate_json, damage.mutate_json, *_bytes_of("cut", "empty", "one bit"))
_WEIGHTS = (damage.mutate_safetensors, damage.mutate_safetensors, *_bytes_of("cut", "empty"))
_OF_BUNDLE = (EVAL, EVAL, EVAL, BEGIN, INSPECT)

TARGETS: list[tuple[int, Target]] = [
    (6, Target("bundle", "manifest.json", (*_OF_BUNDLE, RESUME), (damage.mutate_manifest,))),
    (6, Target("bundle", "programs/*", (*_OF_BUNDLE, PROBE), tuple(map(_then_rehash_bundle, _BYTES)))),
    (6, Target("bundle", "weights/*", (*_OF_BUNDLE, PROBE), tuple(map(_then_rehash_bundle, _BYTES)))),
    (3, Target("bundle", "tables.safetensors", _OF_BUNDLE, tuple(map(_then_rehash_bundle, _WEIGHTS)))),
    (2, Target("bundle", "adapter/adapter_config.json", _OF_BUNDLE, tuple(map(_then_rehash_bundle, _JSON)))),
    (3, Target("bundle", "adapter/*.safetensors", _OF_BUNDLE, tuple(map(_then_rehash_bundle, _WEIGHTS)))),
    (4, Target("bundle", "tokenizer/tokenizer.json", _OF_BUNDLE, tuple(map(_then_rehash_bundle, _JSON)))),
    (1, Target("bundle", "tokenizer/*.jinja", _OF_BUNDLE, tuple(map(_then_rehash_bundle, _BYTES)))),
    (
        3,
        Target(
            "adapter", "adapter_config.json", (EVAL_ADAPTER, BEGIN), tuple(map(_then_rehash_folder, _JSON))
        ),
    ),
    (3, Target("adapter", "*.safetensors", (EVAL_ADAPTER, BEGIN), tuple(map(_then_rehash_folder, _WEIGHTS)))),
    (2, Target("adapter", "hashes.json", (EVAL_ADAPTER, BEGIN), (damage.mutate_json,))),
    (10, Target("unfinished", "journal.jsonl", (RESUME,), (damage.mutate_journal,))),
    (4, Target("finished", "journal.jsonl", (REPLAY, RESUME_FINISHED), (damage.mutate_journal,))),
    (4, Target("unfinished", "config.yaml", (RESUME,))),
    (6, Target("unfinished", "metrics.jsonl", (RESUME,), (damage.mutate_json,))),
    (2, Target("finished", "metrics.jsonl", (REPORT,), (damage.mutate_json,))),
    (2, Target("unfinished", "log.txt", (RESUME,))),
    (2, Target("unfinished", "run.lock", (RESUME,))),
    (2, Target("unfinished", "run.json", (RESUME,))),
    (
        4,
        Target(
            "unfinished", "checkpoints/*/*.safetensors", (RESUME,), tuple(map(_then_rehash_folder, _WEIGHTS))
        ),
    ),
    (4, Target("unfinished", "checkpoints/*/*.json", (RESUME,), tuple(map(_then_rehash_folder, _JSON)))),
    (2, Target("unfinished", "trunk_cache/*", (RESUME,))),
    (3, Target("finished", "final/*", (EVAL_RUN, REPLAY), ())),
    (3, Target("task.yaml", "", (RESUME,))),
    (3, Target("train.jsonl", "", (RESUME,))),
    (2, Target("task.yaml", "", (EVAL, BEGIN), is_judged=False)),
    (3, Target("dev.jsonl", "", (EVAL,), is_judged=False)),
    (2, Target("train.jsonl", "", (BEGIN,), is_judged=False)),
]


def attack_a_file(bench: Bench, random: Random, folder: Path) -> tuple[list[Case], Counter[str]]:
    """Damage one file and let a verb read it."""
    (target,) = random.choices([each for _, each in TARGETS], [weight for weight, _ in TARGETS])
    use = random.choice(target.uses)
    kinds = _KINDS if target.top == "bundle" and use is not RESUME else _RUN_KINDS
    kind = random.choice([kind for kind in kinds if kind in bench.workshop.kinds])
    scene = Scene(bench, kind, folder)
    if use.needs:
        scene.copy(use.needs)
    files = target.files(scene.copy(target.top))
    if not files:
        return [], Counter()
    expected = _expected(bench, kind, target, use)
    path, is_crafted = random.choice(files), bool(target.crafted) and random.random() < 0.4
    if is_crafted:
        name, way = "crafted", random.choice(target.crafted)
    else:
        name, way = random.choice(list(damage.WAYS.items()))
    foreign = _add_foreign_folders(scene, target)
    try:
        way(path, random)
    except ValueError:  # a way for JSON, on what is none
        name, way = "all noise", damage.WAYS["all noise"]
        way(path, random)
    linked = damage.aside(path)
    before = linked.read_bytes() if linked.is_file() else b""
    ended = prge_ends(use.words(scene), LIMITS)
    verdict = judged(ended) or _compared(use, scene, expected, target.is_judged and not is_crafted)
    if (linked.is_file() and linked.read_bytes() != before) or not all(each.is_dir() for each in foreign):
        verdict = Verdict.FOLLOWED
    label = f"{ended.words[0]}: {target.top}{'/' if target.pattern else ''}{target.pattern}, {name}"
    return [Case(label, verdict, command_line(ended), ended.tail)], Counter()


def _expected(bench: Bench, kind: str, target: Target, use: Use) -> object:
    """What a use gives for undamaged files; None where there is nothing to compare."""
    if use.result is None:
        return None
    key = (kind, target.top, id(use))
    if key not in bench.results:
        scene = Scene(bench, kind, bench.folder / f"expected-{len(bench.results)}")
        scene.folder.mkdir()
        for name in filter(None, (target.top, use.needs)):
            scene.copy(name)
        ended = prge_ends(use.words(scene))
        if ended.code:
            raise RuntimeError(f"{command_line(ended)}\n{ended.output}")
        bench.results[key] = use.result(scene)
        shutil.rmtree(scene.folder)
    return bench.results[key]


def _add_foreign_folders(scene: Scene, target: Target) -> list[Path]:
    """Folders beside checkpoints whose names are none of ours: they must stay."""
    checkpoints = scene.folder / target.top / "checkpoints"
    if target.top != "unfinished" or not checkpoints.is_dir():
        return []
    source = sorted(path for path in checkpoints.iterdir() if path.is_dir())[-1]
    return [Path(shutil.copytree(source, checkpoints / name)) for name in _FOREIGN]


def _compared(use: Use, scene: Scene, expected: object, is_judged: bool) -> Verdict:
    if use.result is None:
        return Verdict.ACCEPTED
    found = use.result(scene)
    if found == expected:
        return Verdict.ACCEPTED
    return Verdict.OTHER if not is_judged and _is_finite(found) else Verdict.SILENT


def _is_finite(found: Any) -> bool:
    numbers = [value for value in found.values() if not isinstance(value, bytes)]
    return all(isinstance(value, int | float) and math.isfinite(value) for value in numbers)
