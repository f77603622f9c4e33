"""Damaged models at export, publish and baseline; exports and publications that are killed on their way."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from random import Random

import damage
from child import Child, Limits, prge_ends
from outcome import Case, Verdict, judged, worked
from workshop import KINDS, Bench

LIMITS = Limits(seconds=600, processor_seconds=200, memory=4 << 30)
_KILLS = 3

# File of a model, and whether every change of it must be refused or change nothing.
_FILES = [
    *[("config.json", False), ("config.json", False), ("generation_config.json", False)],
    *[("model.safetensors", True), ("model.safetensors", True), ("tokenizer.json", False)],
    *[("tokenizer_config.json", False), ("chat_template.jinja", False)],
    *[("model.safetensors.index.json", True), ("pytorch_model.bin", True)],
]
_OF_WEIGHTS = ["cut", "cut out", "empty", "all noise", "missing", "folder", "pipe", "device", "dangling link"]
_INDICES = [
    {"weight_map": {"model.embed_tokens.weight": "../../../etc/passwd"}},
    {"weight_map": {"model.embed_tokens.weight": "/etc/passwd"}},
    {"weight_map": {"model.embed_tokens.weight": "missing.safetensors"}},
    {"weight_map": {}},
    {"weight_map": []},
    [],
]


def attack_a_model(bench: Bench, random: Random, folder: Path) -> tuple[list[Case], Counter[str]]:
    """Damage a file of a model, and let a verb of a workstation read it."""
    model = Path(shutil.copytree(bench.workshop.model("llama"), folder / "model"))
    file, is_judged = random.choice(_FILES)
    name = _damaged(model / file, random)
    verb, words = random.choice(_verbs(bench, model, folder))
    # A kind of damage that leaves a whole model of other numbers: only who knows its hash can tell.
    if name in ("one bit", "eight bits", "noise", "zeros", "swapped", "link", "huge", "lines", "grown"):
        is_judged = False
    ended = prge_ends([*words, "--out", folder / "out"], LIMITS)
    verdict = judged(ended)
    if verdict is None:
        found, expected = _left(folder / "out"), _expected(bench, random, verb)
        same = found == expected or verb != "export"
        verdict = Verdict.ACCEPTED if same else Verdict.SILENT if is_judged else Verdict.OTHER
    return [Case.of(f"{verb}: {file}, {name}", verdict, ended)], Counter()


def _damaged(path: Path, random: Random) -> str:
    """Damage a file of a model; the way's name."""
    if path.name.endswith("index.json"):
        path.write_text(json.dumps(random.choice(_INDICES)))
        if random.random() < 0.5:
            (path.parent / "model.safetensors").unlink()
        return "index"
    if path.name == "pytorch_model.bin":
        path.write_bytes(b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R.")
        (path.parent / "model.safetensors").unlink()
        return "pickled"
    if random.random() < 0.6 and path.suffix in (".json", ".safetensors"):
        way: damage.Way = damage.mutate_safetensors if path.suffix == ".safetensors" else damage.mutate_json
        way(path, random)
        return "crafted"
    name = random.choice(_OF_WEIGHTS if path.suffix == ".safetensors" else list(damage.WAYS))
    damage.WAYS[name](path, random)
    return name


def _verbs(bench: Bench, model: Path, folder: Path) -> list[tuple[str, list[object]]]:
    same = ["--model", model, "--bundle", bench.workshop.bundle("decoder")]
    publish = [bench.original("decoder", "finished"), *same, "--format", "merged"]
    baseline = [*same, *bench.workshop.rows, "--method", "backprop-lora-fa", "--steps", 1, "--quiet"]
    return [
        *[("export", _export(model, "--target-modules", "all-linear"))] * 3,
        *[("publish", ["publish", *publish]), ("baseline", ["baseline", *baseline])],
    ]


def _export(model: Path, *more: object) -> list[object]:
    return ["export", "--model", model, *more, *KINDS["decoder"][1], "--roles", "stack"]


def _left(out: Path) -> object:
    """What an export wrote, but for where and when."""
    manifest = out / "manifest.json"
    return json.loads(manifest.read_text())["files"] if manifest.is_file() else None


def _expected(bench: Bench, random: Random, verb: str) -> object:
    """What an export of the undamaged model writes."""
    if verb not in bench.results:
        out = bench.folder / f"expected {verb}"
        # A bundle names its model's folder: that of the cases.
        model = bench.folder / "original" / "model"
        shutil.copytree(bench.workshop.model("llama"), model, dirs_exist_ok=True)
        _, words = _verbs(bench, model, out)[0]
        prge_ends([*words, "--out", out], LIMITS)
        bench.results[verb] = _left(out)
    return bench.results[verb]


def attack_a_workstation(bench: Bench, random: Random, folder: Path) -> tuple[list[Case], Counter[str]]:
    """An export or a publication that is killed leaves nothing or all of it, and can be done again."""
    counts: Counter[str] = Counter(runs=1)
    finished, bundle = bench.original("decoder", "finished"), bench.workshop.bundle("decoder")
    publish = ["publish", finished, "--bundle", bundle, "--model", bench.workshop.model("llama")]
    calls: dict[str, list[object]] = {
        "export": _export(bench.workshop.model("llama")),
        "publish peft": [*publish, "--format", "peft"],
        "publish merged": [*publish, "--format", "merged"],
        "publish program": [*publish, "--format", "program"],
        "replay": ["replay", finished],
    }
    name = random.choice([*calls, "publish peft", "replay"])
    words, out = calls[name], folder / "place" / "out"
    out.parent.mkdir()
    began = time.monotonic()
    whole = prge_ends([*words, "--out", folder / "whole"], LIMITS)
    if whole.code:
        return [Case.of(name, worked(whole), whole)], counts
    seconds, expected = time.monotonic() - began, _tree(folder / "whole")
    for _ in range(_KILLS):
        child = Child([*words, "--out", out], LIMITS)
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
            if _tree(out) != expected:
                return [Case.of(name, Verdict.DIFFERENT, ended, _difference(expected, out))], counts
            shutil.rmtree(out)
    again = prge_ends([*words, "--out", out], LIMITS)
    verdict = judged(again) or Verdict.ACCEPTED
    left = sorted(path.name for path in out.parent.iterdir() if path != out)
    if verdict is Verdict.ACCEPTED and (_tree(out) != expected or left):
        verdict = Verdict.DIFFERENT
    difference = f"left beside it: {left}\n{_difference(expected, out)}"
    return [Case.of(f"{name}, killed", verdict, again, difference)], counts


def _tree(folder: Path) -> dict[str, object]:
    """Files of a folder, without what tells when they were made."""
    files = ((str(path.relative_to(folder)), path) for path in sorted(folder.rglob("*")) if path.is_file())
    return {name: path.read_bytes() for name, path in files if name not in ("manifest.json", "README.md")}


def _difference(expected: dict[str, object], out: Path) -> str:
    found = _tree(out) if out.exists() else {}
    return "\n".join(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
