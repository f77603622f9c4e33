"""Damaged, missing, linked and hostile files, each read by the verb that reads it; see tables.yaml.

A case passes if the verb refuses with its own message, or if its result is that of the undamaged file. If
nothing determines the content of a file (rows that are scored, a bundle with recomputed hashes), another
result is valid too. Everywhere else another result is a failure, as are signals, tracebacks and hanging.
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
from child import Limits, run_prge
from outcome import Case, Findings, Verdict, judge
from tables import TABLES
from workshop import Bench

LIMITS = Limits(seconds=300, processor_seconds=30, memory=1 << 30)
WORKSTATION_LIMITS = Limits(seconds=600, processor_seconds=200, memory=4 << 30)
_TYPES = ["decoder", "decoder", "encoder", "upper", "quantized"]
_RUN_TYPES = ["decoder", "decoder", "encoder", "upper"]
_DECODER_ITEMS = ("model", "gguf", "feedback.jsonl")
_RUNS = ("finished", "unfinished", "adapter")
_FOREIGN = ["step-000004 (copy)", "step-000010-mine", "step-10", "notes"]


@dataclass
class Scene:
    """The folder of one case with copies of what is damaged; everything else belongs to the bench."""

    bench: Bench
    bundle_type: str
    folder: Path

    def copy(self, name: str) -> Path:
        """Return the case's copy of an original; see `Bench.original`."""
        source, target = self.bench.original(self.bundle_type, name), self.folder / name
        if not target.exists():
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        return target

    def either(self, name: str) -> Path:
        """Return the case's copy if there is one, or else the original."""
        return (
            self.folder / name
            if (self.folder / name).exists()
            else self.bench.original(self.bundle_type, name)
        )

    def prepare(self, top: str, use: Use) -> Path:
        """Copy the damaged item, and the runs or adapters that a use changes; return the damaged item."""
        for name in use.runs:
            self.copy(name)
        return self.copy(top)


@dataclass(frozen=True)
class Use:
    """How a verb reads the damaged item, and the path of its result; see `uses` in the tables."""

    command: str
    result: str = ""

    @property
    def runs(self) -> list[str]:
        """Runs and adapters of the case that the command names."""
        return [name for name in _RUNS if f"@{name}" in self.command.split()]

    def arguments(self, scene: Scene) -> list[object]:
        """Return the command line."""
        arguments: list[object] = []
        for word in self.command.split():
            mark, path = word[0], scene.folder / word[1:]
            if mark == "!" and not path.exists() and not path.is_symlink():
                arguments.pop()
            else:
                arguments.append(path if mark in "@!" else scene.either(path.name) if mark == "?" else word)
        if (
            arguments[0] == "eval" and scene.bundle_type == "encoder" and "--adapter" not in arguments
        ):  # an encoder's head comes from a run
            arguments += ["--adapter", scene.bench.original(scene.bundle_type, "finished")]
        return arguments

    def read_result(self, scene: Scene) -> dict[str, object]:
        """Return the result: hashes of a bundle's files, figures, bytes of weights, or nothing."""
        if not self.result:
            return {}
        path = scene.folder / self.result
        if path.name == "manifest.json":
            return {
                name: entry["sha256"].encode()
                for name, entry in json.loads(path.read_text())["files"].items()
            }
        if path.suffix == ".json":
            figures = json.loads(path.read_text())
            return {name: figures[name] for name in ("loss", "accuracy", "examples") if name in figures}
        return {path.name: path.read_bytes() for path in path.glob("*.safetensors")}


USES = {name: Use(**use) for name, use in TABLES["uses"].items()}
_WORKSTATION_USES = ("export", "export", "export", "publish", "baseline")


@dataclass(frozen=True)
class Target:
    """A file, its mutations and the uses that read it; see the tables that begin with `of_`."""

    often: int
    top: str = "model"
    files: str = ""
    uses: Sequence[str] = _WORKSTATION_USES
    crafted: str = ""
    mutations: str = ""
    is_judged: bool = True

    def paths(self, top: Path) -> list[Path]:
        """Return the files of a case that the target matches."""
        return sorted(path for path in (top.glob(self.files) if self.files else [top]) if path.is_file())


def _then(rehash: Callable[[Path], object], *mutations: damage.Mutation) -> tuple[damage.Mutation, ...]:
    """Return mutations that recompute every hash afterwards."""

    def wrap(mutation: damage.Mutation) -> damage.Mutation:
        def damaged(path: Path, random: Random) -> None:
            mutation(path, random)
            rehash(path)

        return damaged

    return tuple(map(wrap, mutations))


def _rehash_bundle(path: Path) -> None:
    if path.parent.name == "adapter":
        damage.rehash_folder(path.parent)
    damage.rehash_bundle(next(parent for parent in path.parents if (parent / "manifest.json").exists()))


def _rehash_folder(path: Path) -> None:
    damage.rehash_folder(path.parent)


def _add_index(path: Path, random: Random) -> None:
    """Write an index of weights that names missing or foreign files."""
    path.with_name("model.safetensors.index.json").write_text(json.dumps(random.choice(TABLES["indices"])))
    if random.random() < 0.5:
        path.with_name("model.safetensors").unlink()


def _add_pickle(path: Path, random: Random) -> None:
    """Write weights that run a program if they are unpickled."""
    path.with_name("pytorch_model.bin").write_bytes(b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R.")
    path.with_name("model.safetensors").unlink()


def _select_mutations(*names: str) -> dict[str, damage.Mutation]:
    return {name: damage.MUTATIONS[name] for name in names}


_BYTES = _select_mutations(
    "one bit", "eight bits", "noise", "zeros", "cut", "cut out", "empty", "grown"
).values()
_JSON = (damage.mutate_json, damage.mutate_json, *_select_mutations("cut", "empty", "one bit").values())
_WEIGHTS = (damage.mutate_safetensors, damage.mutate_safetensors, *_select_mutations("cut", "empty").values())
CRAFTED: Mapping[str, Sequence[damage.Mutation]] = {
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
_DETECTED_MUTATIONS = (
    "cut",
    "cut out",
    "empty",
    "all noise",
    "missing",
    "folder",
    "pipe",
    "device",
    "dangling link",
)
MUTATIONS: Mapping[str, Mapping[str, damage.Mutation]] = {
    "": damage.MUTATIONS,
    "json": {**damage.MUTATIONS, "crafted": damage.mutate_json},
    # Other mutations leave a valid model with other numbers: only its hash can tell.
    "weights": {**_select_mutations(*_DETECTED_MUTATIONS), "crafted": damage.mutate_safetensors},
    "beside": {"index": _add_index, "pickled": _add_pickle},
}


def attack_a_file(bench: Bench, random: Random, folder: Path) -> Findings:
    """Damage one file and read it with a verb of a device."""
    return _attack_case(bench, random, folder, "of_device", LIMITS)


def attack_a_model(bench: Bench, random: Random, folder: Path) -> Findings:
    """Damage a file of a model and read it with a verb of a workstation."""
    return _attack_case(bench, random, folder, "of_model", WORKSTATION_LIMITS)


def attack_a_gguf_file(bench: Bench, random: Random, folder: Path) -> Findings:
    """Damage a GGUF file, mostly its header, and read it with a verb of a workstation."""
    return _attack_case(bench, random, folder, "of_gguf", WORKSTATION_LIMITS)


def _attack_case(bench: Bench, random: Random, folder: Path, table: str, limits: Limits) -> Findings:
    targets = [Target(**target) for target in TABLES[table]]
    (target,) = random.choices(targets, [target.often for target in targets])
    use = USES[random.choice(target.uses)]
    bundle_types = _TYPES if target.top == "bundle" and use is not USES["resume"] else _RUN_TYPES
    bundle_type = random.choice(
        [bundle_type for bundle_type in bundle_types if bundle_type in bench.workshop.bundle_types]
    )
    scene = Scene(bench, "decoder" if target.top in _DECODER_ITEMS else bundle_type, folder)
    files = target.paths(scene.prepare(target.top, use))
    if not files:
        return [], Counter()
    undamaged = partial(_result_of_undamaged, bench, scene.bundle_type, target.top, use, limits)
    # If a verb failed on undamaged files, a case would prove nothing.
    expected = bench.once((scene.bundle_type, target.top, use), undamaged)
    crafted = CRAFTED[target.crafted]
    path, is_crafted = random.choice(files), bool(crafted) and random.random() < 0.4
    name, mutation = random.choice(
        [("crafted", mutation) for mutation in crafted]
        if is_crafted
        else [*MUTATIONS[target.mutations].items()]
    )
    foreign = _add_foreign_folders(scene, target)
    try:
        mutation(path, random)
    except ValueError:  # a mutation of JSON on a file that isn't JSON
        name, mutation = "all noise", damage.MUTATIONS["all noise"]
        mutation(path, random)
    linked = damage.linked_path(path)
    before = linked.read_bytes() if linked.is_file() else b""
    result = run_prge(use.arguments(scene), limits)
    is_judged = target.is_judged and not is_crafted
    verdict = judge(result) or _compare(use.read_result(scene), expected, is_judged)
    if (linked.is_file() and linked.read_bytes() != before) or not all(each.is_dir() for each in foreign):
        verdict = Verdict.FOLLOWED
    label = f"{result.arguments[0]}: {target.top}{'/' if target.files else ''}{target.files}, {name}"
    return [Case.of(label, verdict, result)], Counter()


def _result_of_undamaged(
    bench: Bench, bundle_type: str, top: str, use: Use, limits: Limits
) -> dict[str, object]:
    """Return the result of a use on undamaged files."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        scene = Scene(bench, bundle_type, Path(folder))
        scene.prepare(top, use)
        result = run_prge(use.arguments(scene), limits)
        if result.code:
            raise RuntimeError(f"prge {' '.join(result.arguments)}\n{result.output}")
        return use.read_result(scene)


def _add_foreign_folders(scene: Scene, target: Target) -> list[Path]:
    """Add foreign folders next to the checkpoints and return them: they must not change."""
    checkpoints = scene.folder / target.top / "checkpoints"
    if target.top != "unfinished" or not checkpoints.is_dir():
        return []
    source = sorted(path for path in checkpoints.iterdir() if path.is_dir())[-1]
    return [Path(shutil.copytree(source, checkpoints / name)) for name in _FOREIGN]


def _compare(outcome: Mapping[str, object], expected: Mapping[str, object], is_judged: bool) -> Verdict:
    if outcome == expected:
        return Verdict.ACCEPTED
    return Verdict.OTHER if not is_judged and _is_finite(outcome) else Verdict.SILENT


def _is_finite(outcome: Mapping[str, Any]) -> bool:
    numbers = [value for value in outcome.values() if not isinstance(value, bytes)]
    return all(isinstance(value, int | float) and math.isfinite(value) for value in numbers)
