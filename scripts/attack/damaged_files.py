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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import damage
from child import Limits, prge_ends
from outcome import Case, Verdict, judged
from tables import TABLES
from workshop import KINDS, Bench

LIMITS = Limits(seconds=300, processor_seconds=30, memory=1 << 30)
WORKSTATION_LIMITS = Limits(seconds=600, processor_seconds=200, memory=4 << 30)
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
        """A copy of the bench's `bundle`, `finished`, `unfinished`, `adapter`, `model`, rows or task."""
        source, target = self.bench.original(self.kind, name), self.folder / name
        if not target.exists():
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        return target

    def either(self, name: str) -> Path:
        """The case's copy if there is one, else the original."""
        return self.folder / name if (self.folder / name).exists() else self.bench.original(self.kind, name)


Result = Callable[[Scene], object]


def _evaluation(scene: Scene) -> object:
    found = json.loads((scene.folder / "eval.json").read_text())
    return {name: found[name] for name in ("loss", "accuracy", "examples") if name in found}


def _exported(scene: Scene) -> object:
    """Hashes of what an export wrote, where a manifest tells them."""
    files = json.loads((scene.folder / "exported" / "manifest.json").read_text())["files"]
    return {name: entry["sha256"].encode() for name, entry in files.items()}


def _final(name: str) -> Result:
    def weights(scene: Scene) -> object:
        return {path.name: path.read_bytes() for path in (scene.folder / name).glob("*.safetensors")}

    return weights


@dataclass(frozen=True)
class Use:
    """How a verb reads what was damaged, and what its result is; None where it has none to compare.

    Of `command`, `@name` is a file of the case, `?name` the case's copy or else the original, `!name` the
    case's copy, left out with its flag where there is none. `needs` is copied beside what is damaged.
    """

    command: str
    result: Result | None = None
    needs: str = ""

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


_EVAL = "eval --bundle ?bundle --data ?dev.jsonl --threads 1 --task ?task.yaml --json @eval.json"
_BEGIN = (
    "run --bundle ?bundle --train ?train.jsonl --quiet --task ?task.yaml --steps 2 --threads 1 --out @new"
)
_RESUME = "run --quiet --resume @unfinished --bundle !bundle --train !train.jsonl --task !task.yaml"
_PROBE = "probe --bundle ?bundle --data ?dev.jsonl --threads 1 --task ?task.yaml --batches 1 --epsilons 0.01"
EVAL = Use(_EVAL, _evaluation)
EVAL_RUN = Use(f"{_EVAL} --adapter @finished", _evaluation, "finished")
EVAL_ADAPTER = Use(f"{_EVAL} --adapter @adapter", _evaluation, "adapter")
BEGIN = Use(f"{_BEGIN} --adapter !adapter", _final("new/final"))
RESUME = Use(_RESUME, _final("unfinished/final"), "unfinished")
RESUME_FINISHED = Use("run --quiet --resume @finished", _final("finished/final"), "finished")
REPLAY = Use("replay @finished --out @replayed", _final("replayed"), "finished")
INSPECT = Use("inspect @bundle")
REPORT = Use("report @finished --out @report.html", None, "finished")
PROBE = Use(_PROBE)
_SHAPE = " ".join(KINDS["decoder"][1])
EXPORT = Use(
    f"export --model @model --target-modules all-linear {_SHAPE} --roles stack --out @exported", _exported
)
PUBLISH = Use("publish ?finished --bundle ?bundle --model @model --format merged --out @published")
BASELINE = Use(
    "baseline --model @model --bundle ?bundle --train ?train.jsonl --dev ?dev.jsonl --task ?task.yaml "
    "--method backprop-lora-fa --steps 1 --quiet --out @trained"
)


@dataclass(frozen=True)
class Target:
    """A file, how it is damaged, and who reads it.

    `crafted`: ways that leave every checksum right. `is_judged`: something says what the file must be.
    `ways`: those that take no care of checksums.
    """

    top: str
    pattern: str
    uses: tuple[Use, ...]
    crafted: tuple[damage.Way, ...] = ()
    is_judged: bool = True
    ways: Mapping[str, damage.Way] = field(default_factory=lambda: damage.WAYS)

    def files(self, top: Path) -> list[Path]:
        """The files of a case that the target means."""
        return sorted(path for path in (top.glob(self.pattern) if self.pattern else [top]) if path.is_file())


def _then(rehash: Callable[[Path], object], ways: Sequence[damage.Way]) -> tuple[damage.Way, ...]:
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


def _bytes_of(*names: str) -> tuple[damage.Way, ...]:
    return tuple(damage.WAYS[name] for name in names)


_BYTES = _bytes_of("one bit", "eight bits", "noise", "zeros", "cut", "cut out", "empty", "grown")
_JSON = (damage.mutate_json, damage.mutate_json, *_bytes_of("cut", "empty", "one bit"))
_WEIGHTS = (damage.mutate_safetensors, damage.mutate_safetensors, *_bytes_of("cut", "empty"))
_BUNDLE_BYTES, _BUNDLE_JSON, _BUNDLE_WEIGHTS = (
    _then(_rehash_bundle, ways) for ways in (_BYTES, _JSON, _WEIGHTS)
)
_FOLDER_JSON, _FOLDER_WEIGHTS = (_then(_rehash_folder, ways) for ways in (_JSON, _WEIGHTS))
_OF_BUNDLE = (EVAL, EVAL, EVAL, BEGIN, INSPECT)
_OF_ADAPTER = (EVAL_ADAPTER, BEGIN)

TARGETS: list[tuple[int, Target]] = [
    (6, Target("bundle", "manifest.json", (*_OF_BUNDLE, RESUME), (damage.mutate_manifest,))),
    (6, Target("bundle", "programs/*", (*_OF_BUNDLE, PROBE), _BUNDLE_BYTES)),
    (6, Target("bundle", "weights/*", (*_OF_BUNDLE, PROBE), _BUNDLE_BYTES)),
    (3, Target("bundle", "tables.safetensors", _OF_BUNDLE, _BUNDLE_WEIGHTS)),
    (2, Target("bundle", "adapter/adapter_config.json", _OF_BUNDLE, _BUNDLE_JSON)),
    (3, Target("bundle", "adapter/*.safetensors", _OF_BUNDLE, _BUNDLE_WEIGHTS)),
    (4, Target("bundle", "tokenizer/tokenizer.json", _OF_BUNDLE, _BUNDLE_JSON)),
    (1, Target("bundle", "tokenizer/*.jinja", _OF_BUNDLE, _BUNDLE_BYTES)),
    (3, Target("adapter", "adapter_config.json", _OF_ADAPTER, _FOLDER_JSON)),
    (3, Target("adapter", "*.safetensors", _OF_ADAPTER, _FOLDER_WEIGHTS)),
    (2, Target("adapter", "hashes.json", _OF_ADAPTER, (damage.mutate_json,))),
    (10, Target("unfinished", "journal.jsonl", (RESUME,), (damage.mutate_journal,))),
    (4, Target("finished", "journal.jsonl", (REPLAY, RESUME_FINISHED), (damage.mutate_journal,))),
    (4, Target("unfinished", "config.yaml", (RESUME,))),
    (6, Target("unfinished", "metrics.jsonl", (RESUME,), (damage.mutate_json,))),
    (2, Target("finished", "metrics.jsonl", (REPORT,), (damage.mutate_json,))),
    (2, Target("unfinished", "log.txt", (RESUME,))),
    (2, Target("unfinished", "run.lock", (RESUME,))),
    (2, Target("unfinished", "run.json", (RESUME,))),
    (4, Target("unfinished", "checkpoints/*/*.safetensors", (RESUME,), _FOLDER_WEIGHTS)),
    (4, Target("unfinished", "checkpoints/*/*.json", (RESUME,), _FOLDER_JSON)),
    (2, Target("unfinished", "trunk_cache/*", (RESUME,))),
    (3, Target("finished", "final/*", (EVAL_RUN, REPLAY), ())),
    (3, Target("task.yaml", "", (RESUME,))),
    (3, Target("train.jsonl", "", (RESUME,))),
    (2, Target("task.yaml", "", (EVAL, BEGIN), is_judged=False)),
    (3, Target("dev.jsonl", "", (EVAL,), is_judged=False)),
    (2, Target("train.jsonl", "", (BEGIN,), is_judged=False)),
]


# Other ways leave a whole model of other numbers: only who knows its hash can tell.
_TOLD_WAYS = ("cut", "cut out", "empty", "all noise", "missing", "folder", "pipe", "device", "dangling link")
_OF_MODEL: dict[str, damage.Way] = {**damage.WAYS, "crafted": damage.mutate_json}
_OF_MODELS_WEIGHTS: dict[str, damage.Way] = {
    **{name: damage.WAYS[name] for name in _TOLD_WAYS},
    "crafted": damage.mutate_safetensors,
}
_OF_WORKSTATION = (EXPORT, EXPORT, EXPORT, PUBLISH, BASELINE)


def _index(path: Path, random: Random) -> None:
    """An index of weights that names what isn't there, or isn't ours."""
    path.with_name("model.safetensors.index.json").write_text(json.dumps(random.choice(TABLES["indices"])))
    if random.random() < 0.5:
        path.with_name("model.safetensors").unlink()


def _pickled(path: Path, random: Random) -> None:
    """Weights that call a program where they are unpickled."""
    path.with_name("pytorch_model.bin").write_bytes(b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R.")
    path.with_name("model.safetensors").unlink()


MODEL_TARGETS: list[tuple[int, Target]] = [
    (2, Target("model", "model.safetensors", _OF_WORKSTATION, ways=_OF_MODELS_WEIGHTS)),
    (2, Target("model", "config.json", _OF_WORKSTATION, ways={"index": _index, "pickled": _pickled})),
    (2, Target("model", "config.json", _OF_WORKSTATION, is_judged=False, ways=_OF_MODEL)),
    *(
        (1, Target("model", name, _OF_WORKSTATION, is_judged=False, ways=_OF_MODEL))
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "*.jinja")
    ),
]


def attack_a_file(bench: Bench, random: Random, folder: Path) -> tuple[list[Case], Counter[str]]:
    """Damage one file and let a verb of a device read it."""
    return _attacked(bench, random, folder, TARGETS, LIMITS)


def attack_a_model(bench: Bench, random: Random, folder: Path) -> tuple[list[Case], Counter[str]]:
    """Damage a file of a model, and let a verb of a workstation read it."""
    return _attacked(bench, random, folder, MODEL_TARGETS, WORKSTATION_LIMITS)


def _attacked(
    bench: Bench, random: Random, folder: Path, targets: Sequence[tuple[int, Target]], limits: Limits
) -> tuple[list[Case], Counter[str]]:
    (target,) = random.choices([each for _, each in targets], [weight for weight, _ in targets])
    use = random.choice(target.uses)
    kinds = _KINDS if target.top == "bundle" and use is not RESUME else _RUN_KINDS
    kind = random.choice([kind for kind in kinds if kind in bench.workshop.kinds])
    scene = Scene(bench, "decoder" if target.top == "model" else kind, folder)
    if use.needs:
        scene.copy(use.needs)
    files = target.files(scene.copy(target.top))
    if not files:
        return [], Counter()
    expected = _expected(scene, target, use, limits)
    path, is_crafted = random.choice(files), bool(target.crafted) and random.random() < 0.4
    ways = [("crafted", way) for way in target.crafted] if is_crafted else [*target.ways.items()]
    name, way = random.choice(ways)
    foreign = _add_foreign_folders(scene, target)
    try:
        way(path, random)
    except ValueError:  # a way for JSON, on what is none
        name, way = "all noise", damage.WAYS["all noise"]
        way(path, random)
    linked = damage.aside(path)
    before = linked.read_bytes() if linked.is_file() else b""
    ended = prge_ends(use.words(scene), limits)
    verdict = judged(ended) or _compared(use, scene, expected, target.is_judged and not is_crafted)
    if (linked.is_file() and linked.read_bytes() != before) or not all(each.is_dir() for each in foreign):
        verdict = Verdict.FOLLOWED
    label = f"{ended.words[0]}: {target.top}{'/' if target.pattern else ''}{target.pattern}, {name}"
    return [Case.of(label, verdict, ended)], Counter()


def _expected(scene: Scene, target: Target, use: Use, limits: Limits) -> object:
    """What a use gives for undamaged files; None where there is nothing to compare."""
    bench, key = scene.bench, (scene.kind, target.top, id(use))
    if use.result is not None and key not in bench.results:
        whole = Scene(bench, scene.kind, bench.folder / f"expected-{len(bench.results)}")
        whole.folder.mkdir()
        for name in filter(None, (target.top, use.needs)):
            whole.copy(name)
        ended = prge_ends(use.words(whole), replace(limits, memory=limits.memory and 2 * limits.memory))
        if ended.code:
            raise RuntimeError(f"prge {' '.join(ended.words)}\n{ended.output}")
        bench.results[key] = use.result(whole)
        shutil.rmtree(whole.folder)
    return bench.results.get(key)


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
