"""Damaged, missing, linked and hostile files, each read by the verb that reads it; tables.yaml has which.

A case passes if the verb refuses in its own words, or if its result is that of the undamaged file. Where
nothing says what a file must be (rows that are scored, a bundle whose every hash was made to fit), another
result is another input's; everywhere else it is a failure, as are signals, tracebacks and hanging.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import damage
from child import Limits, prge_ends
from outcome import Case, Found, Verdict, judged
from tables import TABLES
from workshop import Bench

LIMITS = Limits(seconds=300, processor_seconds=30, memory=1 << 30)
WORKSTATION_LIMITS = Limits(seconds=600, processor_seconds=200, memory=4 << 30)
_KINDS = ["decoder", "decoder", "encoder", "upper", "quantized"]
_RUN_KINDS = ["decoder", "decoder", "encoder", "upper"]
_OF_DECODERS = ("model", "gguf", "feedback.jsonl")
_RUNS = ("finished", "unfinished", "adapter")
_FOREIGN = ["step-000004 (copy)", "step-000010-mine", "step-10", "notes"]


@dataclass
class Scene:
    """Folders of one case: what is damaged lies in `folder`, everything else is the bench's own."""

    bench: Bench
    kind: str
    folder: Path

    def copy(self, name: str) -> Path:
        """A copy of what the bench has by that name; see `Bench.original`."""
        source, target = self.bench.original(self.kind, name), self.folder / name
        if not target.exists():
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        return target

    def either(self, name: str) -> Path:
        """The case's copy if there is one, else the original."""
        return self.folder / name if (self.folder / name).exists() else self.bench.original(self.kind, name)

    def prepare(self, top: str, use: Use) -> Path:
        """Copy what is damaged, and the run or adapter beside it that a use changes; the first of them."""
        for name in use.runs:
            self.copy(name)
        return self.copy(top)


@dataclass(frozen=True)
class Use:
    """How a verb reads what was damaged, and where its result lies; see `uses` of the tables."""

    command: str
    result: str = ""

    @property
    def runs(self) -> list[str]:
        """Runs and adapters of the case that it names."""
        return [name for name in _RUNS if f"@{name}" in self.command.split()]

    def words(self, scene: Scene) -> list[object]:
        """The command line."""
        words: list[object] = []
        for word in self.command.split():
            mark, path = word[0], scene.folder / word[1:]
            if mark == "!" and not path.exists() and not path.is_symlink():
                words.pop()
            else:
                words.append(path if mark in "@!" else scene.either(path.name) if mark == "?" else word)
        if words[0] == "eval" and scene.kind == "encoder" and "--adapter" not in words:  # its head is a run's
            words += ["--adapter", scene.bench.original(scene.kind, "finished")]
        return words

    def found(self, scene: Scene) -> dict[str, object]:
        """The result: hashes of a bundle's files, figures, bytes of weights, or nothing."""
        if not self.result:
            return {}
        path = scene.folder / self.result
        if path.name == "manifest.json":
            return {
                name: entry["sha256"].encode()
                for name, entry in json.loads(path.read_text())["files"].items()
            }
        if path.suffix == ".json":
            told = json.loads(path.read_text())
            return {name: told[name] for name in ("loss", "accuracy", "examples") if name in told}
        return {path.name: path.read_bytes() for path in path.glob("*.safetensors")}


USES = {name: Use(**use) for name, use in TABLES["uses"].items()}
_OF_WORKSTATION = ("export", "export", "export", "publish", "baseline")


@dataclass(frozen=True)
class Target:
    """A file, how it is damaged, and who reads it; see the tables that begin with `of_`."""

    often: int
    top: str = "model"
    files: str = ""
    uses: Sequence[str] = _OF_WORKSTATION
    crafted: str = ""
    ways: str = ""
    is_judged: bool = True

    def paths(self, top: Path) -> list[Path]:
        """The files of a case that the target means."""
        return sorted(path for path in (top.glob(self.files) if self.files else [top]) if path.is_file())


def _then(rehash: Callable[[Path], object], *ways: damage.Way) -> tuple[damage.Way, ...]:
    """Ways after which every hash is made to fit."""

    def both(way: damage.Way) -> damage.Way:
        def damaged(path: Path, random: Random) -> None:
            way(path, random)
            rehash(path)

        return damaged

    return tuple(map(both, ways))


def _rehash_bundle(path: Path) -> None:
    if path.parent.name == "adapter":
        damage.rehash_folder(path.parent)
    damage.rehash_bundle(next(parent for parent in path.parents if (parent / "manifest.json").exists()))


def _rehash_folder(path: Path) -> None:
    damage.rehash_folder(path.parent)


def _index(path: Path, random: Random) -> None:
    """An index of weights that names what isn't there, or isn't ours."""
    path.with_name("model.safetensors.index.json").write_text(json.dumps(random.choice(TABLES["indices"])))
    if random.random() < 0.5:
        path.with_name("model.safetensors").unlink()


def _pickled(path: Path, random: Random) -> None:
    """Weights that call a program where they are unpickled."""
    path.with_name("pytorch_model.bin").write_bytes(b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R.")
    path.with_name("model.safetensors").unlink()


def _named(*names: str) -> dict[str, damage.Way]:
    return {name: damage.WAYS[name] for name in names}


_BYTES = _named("one bit", "eight bits", "noise", "zeros", "cut", "cut out", "empty", "grown").values()
_JSON = (damage.mutate_json, damage.mutate_json, *_named("cut", "empty", "one bit").values())
_WEIGHTS = (damage.mutate_safetensors, damage.mutate_safetensors, *_named("cut", "empty").values())
CRAFTED: Mapping[str, Sequence[damage.Way]] = {
    "": (),
    "json": (damage.mutate_json,),
    "manifest": (damage.mutate_manifest,),
    "journal": (damage.mutate_journal,),
    "bundle bytes": _then(_rehash_bundle, *_BYTES),
    "bundle json": _then(_rehash_bundle, *_JSON),
    "bundle weights": _then(_rehash_bundle, *_WEIGHTS),
    "folder json": _then(_rehash_folder, *_JSON),
    "folder weights": _then(_rehash_folder, *_WEIGHTS),
    "gguf": (damage.mutate_gguf,),
}
_TOLD = ("cut", "cut out", "empty", "all noise", "missing", "folder", "pipe", "device", "dangling link")
WAYS: Mapping[str, Mapping[str, damage.Way]] = {
    "": damage.WAYS,
    "json": {**damage.WAYS, "crafted": damage.mutate_json},
    # Other ways leave a whole model of other numbers: only who knows its hash can tell.
    "weights": {**_named(*_TOLD), "crafted": damage.mutate_safetensors},
    "beside": {"index": _index, "pickled": _pickled},
}


def attack_a_file(bench: Bench, random: Random, folder: Path) -> Found:
    """Damage one file and let a verb of a device read it."""
    return _attacked(bench, random, folder, "of_device", LIMITS)


def attack_a_model(bench: Bench, random: Random, folder: Path) -> Found:
    """Damage a file of a model, and let a verb of a workstation read it."""
    return _attacked(bench, random, folder, "of_model", WORKSTATION_LIMITS)


def attack_a_gguf_file(bench: Bench, random: Random, folder: Path) -> Found:
    """Damage a GGUF file, its header above all, and let a verb of a workstation read it."""
    return _attacked(bench, random, folder, "of_gguf", WORKSTATION_LIMITS)


def _attacked(bench: Bench, random: Random, folder: Path, table: str, limits: Limits) -> Found:
    targets = [Target(**target) for target in TABLES[table]]
    (target,) = random.choices(targets, [target.often for target in targets])
    use = USES[random.choice(target.uses)]
    kinds = _KINDS if target.top == "bundle" and use is not USES["resume"] else _RUN_KINDS
    kind = random.choice([kind for kind in kinds if kind in bench.workshop.kinds])
    scene = Scene(bench, "decoder" if target.top in _OF_DECODERS else kind, folder)
    files = target.paths(scene.prepare(target.top, use))
    if not files:
        return [], Counter()
    undamaged = partial(_undamaged, bench, scene.kind, target.top, use, limits)
    # Of a verb that fails anyway a case would show nothing.
    expected = bench.once((scene.kind, target.top, use), undamaged)
    crafted = CRAFTED[target.crafted]
    path, is_crafted = random.choice(files), bool(crafted) and random.random() < 0.4
    name, way = random.choice(
        [("crafted", way) for way in crafted] if is_crafted else [*WAYS[target.ways].items()]
    )
    foreign = _add_foreign_folders(scene, target)
    try:
        way(path, random)
    except ValueError:  # a way for JSON, on what is none
        name, way = "all noise", damage.WAYS["all noise"]
        way(path, random)
    linked = damage.aside(path)
    before = linked.read_bytes() if linked.is_file() else b""
    ended = prge_ends(use.words(scene), limits)
    is_judged = target.is_judged and not is_crafted
    verdict = judged(ended) or _compared(use.found(scene), expected, is_judged)
    if (linked.is_file() and linked.read_bytes() != before) or not all(each.is_dir() for each in foreign):
        verdict = Verdict.FOLLOWED
    label = f"{ended.words[0]}: {target.top}{'/' if target.files else ''}{target.files}, {name}"
    return [Case.of(label, verdict, ended)], Counter()


def _undamaged(bench: Bench, kind: str, top: str, use: Use, limits: Limits) -> dict[str, object]:
    """What a use gives for undamaged files."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        scene = Scene(bench, kind, Path(folder))
        scene.prepare(top, use)
        ended = prge_ends(use.words(scene), limits)
        if ended.code:
            raise RuntimeError(f"prge {' '.join(ended.words)}\n{ended.output}")
        return use.found(scene)


def _add_foreign_folders(scene: Scene, target: Target) -> list[Path]:
    """Folders beside checkpoints whose names are none of ours: they must stay."""
    checkpoints = scene.folder / target.top / "checkpoints"
    if target.top != "unfinished" or not checkpoints.is_dir():
        return []
    source = sorted(path for path in checkpoints.iterdir() if path.is_dir())[-1]
    return [Path(shutil.copytree(source, checkpoints / name)) for name in _FOREIGN]


def _compared(found: Mapping[str, object], expected: Mapping[str, object], is_judged: bool) -> Verdict:
    if found == expected:
        return Verdict.ACCEPTED
    return Verdict.OTHER if not is_judged and _is_finite(found) else Verdict.SILENT


def _is_finite(found: Mapping[str, Any]) -> bool:
    numbers = [value for value in found.values() if not isinstance(value, bytes)]
    return all(isinstance(value, int | float) and math.isfinite(value) for value in numbers)
