"""Hand-made results of a comparison, and a fake `prge` that writes the files of its verbs without work."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from prge.cli.settings import parse_settings, settings_to_yaml
from server_export.evidence.compare.settings import CompareSettings
from tests.bundles import make_bundle

SEEDS = (1, 2, 3)


def settings_for(out: Path, *arguments: object) -> CompareSettings:
    """Return settings for the demo's model and rows."""
    argv = ["--preset", "demo", "--out", str(out), *map(str, arguments)]
    return parse_settings(CompareSettings, argv, "prge compare")


def make_run(seed: int, decay: float, step_seconds: float, rows: int, **changes: Any) -> dict[str, Any]:
    """Return a stored run of 40 steps with loss 0.2 + 0.8 * decay^(step / 10), worse by seed."""
    points = []
    for step in range(0, 41, 10):
        loss = 0.2 + 0.8 * decay ** (step / 10) + 0.01 * seed
        seconds = step * step_seconds
        points.append({"step": step, "forward_passes": step * rows, "seconds": seconds, "loss": loss})
    return {
        "seed": seed,
        "steps": 40,
        "forward_passes": 40 * rows,
        "tokens_per_second": rows * 20 / step_seconds,
        "peak_bytes": 90_000_000 + seed,
        "own_idle_bytes": None,
        "activation_bytes": 5_000_000,
        "curve": points,
        "test": {"loss": points[-1]["loss"], "accuracy": 1 - points[-1]["loss"], "examples": 400},
        **changes,
    }


def make_method(forward_only: bool, runs: Sequence[Mapping[str, Any]], **changes: Any) -> dict[str, Any]:
    """Return a stored method."""
    return {
        "title": "a method",
        "family": "engine" if forward_only else "pytorch",
        "forward_only": forward_only,
        "learning_rate": 0.01,
        "search": [
            {"learning_rate": 0.003, "loss": 0.7, "steps": 10},
            {"learning_rate": 0.01, "loss": 0.5, "steps": 10},
            {"learning_rate": 0.03, "loss": None, "steps": 10},
        ],
        "runs": list(runs),
        "failures": [],
        **changes,
    }


def make_result(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Return a stored comparison: backpropagation learns fast and needs much memory; one method failed."""
    settings = settings_for(tmp_path / "out", "--seeds", *SEEDS)
    backprop = [
        make_run(seed, 0.3, 0.02, 48, peak_bytes=400_000_000, activation_bytes=30_000_000) for seed in SEEDS
    ]
    return {
        "command": "prge compare --preset demo <b>&amp;",
        "model_name": "<script>alert(1)</script> & co",
        "settings": yaml.safe_load(settings_to_yaml(settings)),
        "idle_bytes": 40_000_000,
        "row_counts": {"train": 400, "dev": 200, "test": 400},
        "methods": {
            "backprop-lora-fa": make_method(False, backprop),
            "p-rge": make_method(True, [make_run(seed, 0.6, 0.01, 32) for seed in SEEDS]),
            "tangent": make_method(True, [make_run(seed, 0.9, 0.01, 20) for seed in SEEDS]),
            "exact": make_method(
                False, [], learning_rate=None, search=[], failures=["ended with code 2: <no> such | thing"]
            ),
        },
        "hashes": {"train rows": "a" * 64, "bundle": "b" * 64},
        "meta": {
            "prge": "0.1.0",
            "python": "3.11",
            "platform": "Linux",
            "cpu": {"model": "a processor", "count": 2},
            "memory_bytes": 8_000_000_000,
            "versions": {"numpy": "2.0"},
        },
        **changes,
    }


class FakeVerbs:
    """Stands in for `prge`: writes folders of bundles and runs; `calls` records verbs and their settings.

    `broken` names verbs that end with code 2; runs with learning rates above `diverging` diverge.
    """

    def __init__(self, broken: Sequence[str] = (), diverging: float = 1e9) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.broken = broken
        self.diverging = diverging

    def __call__(self, arguments: list[str], log: Path) -> int:
        """See `server_export.evidence.compare.children.run_verb`."""
        verb, flag, path = arguments
        settings: dict[str, Any] = {"resume": path}
        if flag != "--resume":
            settings = yaml.safe_load(Path(path).read_text())
        self.calls.append((verb, settings))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as stream:
            stream.write(f"$ prge {' '.join(arguments)}\n{verb} said this\n")
        if verb in self.broken:
            return 2
        if verb == "export":
            make_bundle(Path(settings["out"]))
        elif verb == "eval":
            Path(settings["json"]).write_text('{"examples": 400, "loss": 0.5, "accuracy": 0.75}')
        elif settings.get("learning_rate", 0) > self.diverging:
            write_run(Path(settings["out"]), settings["steps"], "diverged")
            return 2
        else:
            rate, out = settings.get("learning_rate", 0.01), settings.get("out") or settings["resume"]
            write_run(Path(out), settings.get("steps", 10), "completed", rate, baseline=verb == "baseline")
        return 0

    def verbs(self) -> list[str]:
        """Return the called verbs in order."""
        return [verb for verb, _ in self.calls]


def write_run(folder: Path, steps: int, status: str, rate: float = 0.01, baseline: bool = False) -> Path:
    """Write a run folder like `prge run` and `prge baseline`; a rate of 0.03 is the best."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("steps: 1\n")
    floor = 0.1 + abs(rate - 0.03)
    records: list[dict[str, Any]] = [
        {"event": "evaluation", "step": 0, "loss": 0.7, "accuracy": 0.5, "forward_passes": 0, "seconds": 1.0}
    ]
    for step in range(1, steps + 1):
        seconds = 1.0 + 0.1 * step
        records.append(
            {"event": "step", "step": step, "loss": 0.5, "forward_passes": 10 * step, "seconds": seconds}
        )
    records.append(
        {
            **records[0],
            "step": steps,
            "loss": floor,
            "forward_passes": 10 * steps,
            "seconds": 2.0 + 0.1 * steps,
        }
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    train: dict[str, Any] = {
        "steps": steps,
        "forward_passes": 10 * steps,
        "training_rows": 50,
        "training_tokens": 1000,
        "seconds": 2.0 + 0.1 * steps,
        "memory": {"peak_bytes": 100_000_000, "beyond_loaded_bytes": 7_000_000},
    }
    if baseline:
        train["test"] = {"loss": 0.25, "accuracy": 0.875}
        train["memory"]["baseline_bytes"] = 60_000_000
    run = {"status": status, "engine": "native"}
    (folder / "run.json").write_text(json.dumps({"run": run, "train": train, "meta": {}}))
    return folder
