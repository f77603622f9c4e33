"""What `--init eva` gives: frozen lora_a from rows against random ones, exact and forward-only.

    python scripts/studies/init.py --model MODEL --data wikitext.json --out results

Two tasks: the demo's, whose model comes with the repository, and language modelling with MODEL on `--data`, a
JSON list of passages, split as wikitext.py splits them. An export takes its rows for `--init eva` from the
training rows. Each way and estimator takes the rate, of some, that is best on development rows with the first
seed. A seed gives the order of rows, the directions and the random lora_a; those from rows hardly depend on
it, so that one export has them. The best step on development rows is scored on the test rows, once for a
seed. Calls the verbs as a user would and prints the table as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbs import evaluations, prge, summarize
from wikitext import split

DEMO = Path(__file__).resolve().parents[2] / "server_export" / "demo_data"
WAYS: dict[str, dict[str, Any]] = {
    "random": {},
    "eva": {"init": "eva"},
    "eva-spread": {"init": "eva", "spread-ranks": []},
}
ROLES = ["tangent", "back"]


@dataclass(frozen=True)
class Task:
    """A task: what its exports and runs are told, its files by split, and the figure that counts."""

    model: str
    files: Mapping[str, Path]
    metric: str
    figures: tuple[str, ...]
    export: Mapping[str, Any]
    init: Mapping[str, Any]
    rows: Mapping[str, Any]
    run: Mapping[str, Mapping[str, Any]]
    rates: Mapping[str, tuple[float, ...]]


def tasks(arguments: argparse.Namespace) -> dict[str, Task]:
    """The tasks that were asked for, by name."""
    exact, tangent = (
        {"optimizer": "adam", "schedule": "cosine", "estimator": name} for name in ("exact", "tangent")
    )
    task = {"task": DEMO / "task.yaml"}
    found = {
        "demo": Task(
            str(DEMO / "model"),
            {name: DEMO / f"{name}.jsonl" for name in ("train", "dev", "test")},
            "loss",
            ("loss", "accuracy"),
            {"target-modules": ["o_proj", "down_proj"], "sequence-length": 32},
            {"init-task": task["task"]},
            task,
            {
                "exact": {**exact, "steps": 100, "batch-size": 4, "evaluate-every": 12},
                "tangent": {**tangent, "steps": 300, "queries": 4, "batch-size": 4, "evaluate-every": 37},
            },
            {"exact": (1e-2, 3e-2), "tangent": (1e-2, 3e-2)},
        )
    }
    if arguments.model and arguments.data:
        found["wikitext"] = Task(
            arguments.model,
            split(arguments.data, arguments.out / "rows"),
            "perplexity",
            ("perplexity",),
            {"sequence-length": 64, "prepend-bos": "always"},
            {},
            {"overflow": "split", "shuffle-seed": 0},
            {
                "exact": {**exact, "steps": 200, "batch-size": 8, "evaluate-every": 25},
                "tangent": {**tangent, "steps": 400, "queries": 8, "batch-size": 2, "evaluate-every": 100},
            },
            {"exact": (1e-2, 3e-2), "tangent": (1e-2,)},
        )
    return {name: found[name] for name in arguments.tasks if name in found}


def main() -> None:
    """Read the flags, run every task, way, estimator and seed, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id of the model for --data")
    parser.add_argument("--data", type=Path, help="JSON list of passages")
    parser.add_argument("--out", type=Path, required=True, help="folder for bundles, runs and results.json")
    parser.add_argument("--tasks", nargs="+", default=["demo", "wikitext"])
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=list(WAYS))
    parser.add_argument("--estimators", nargs="+", default=["exact", "tangent"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name, task in tasks(arguments).items():
        for estimator in arguments.estimators:
            for way in arguments.ways:
                results[f"{name}, {estimator}, {way}"] = measured(arguments, name, task, estimator, way)
                text = json.dumps(results, indent=2)
                (arguments.out / "results.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def measured(
    arguments: argparse.Namespace, name: str, task: Task, estimator: str, way: str
) -> dict[str, Any]:
    """The runs of one way, at its rate."""
    first, *others = arguments.seeds

    def run(seed: int, rate: float) -> Path:
        return trained(arguments, name, task, estimator, way, seed, rate)

    tried = {rate: best(run(first, rate), task)[task.metric] for rate in task.rates[estimator]}
    rate = min(tried, key=lambda each: tried[each])
    runs = []
    for seed in [first, *others]:
        folder = run(seed, rate)
        record = best(folder, task)
        test = score(folder, bundle(arguments, name, task, way, seed), task)
        figures = {f"test_{figure}": test[figure] for figure in task.figures}
        curve = {each["step"]: each[task.metric] for each in evaluations(folder)}
        runs.append(
            {"seed": seed, "step": record["step"], "dev": record[task.metric], "curve": curve, **figures}
        )
    names = ["dev", *(f"test_{figure}" for figure in task.figures)]
    return {"learning_rate": rate, "dev_by_rate": tried, **summarize(runs, names)}


def best(run: Path, task: Task) -> dict[str, Any]:
    """The evaluation that a run's result is of."""
    return min(evaluations(run), key=lambda record: record[task.metric])


def bundle(arguments: argparse.Namespace, name: str, task: Task, way: str, seed: int) -> Path:
    """The bundle of a way and seed, exported unless it is there."""
    seed = arguments.seeds[0] if WAYS[way] else seed
    folder = Path(arguments.out / f"bundle-{name}-{way}-{seed}")
    if not folder.exists():
        rows = {**WAYS[way], "init-rows": task.files["train"], **task.init} if WAYS[way] else {}
        prge("export", model=task.model, out=folder, seed=seed, roles=ROLES, **task.export, **rows)
    return folder


def trained(
    arguments: argparse.Namespace, name: str, task: Task, estimator: str, way: str, seed: int, rate: float
) -> Path:
    """A run, done unless it was before."""
    folder = Path(arguments.out / f"run-{name}-{estimator}-{way}-{seed}-{rate:g}")
    if not (folder / "final").exists():
        prge(
            "run",
            bundle=bundle(arguments, name, task, way, seed),
            train=task.files["train"],
            dev=task.files["dev"],
            out=folder,
            seed=seed,
            learning_rate=rate,
            select="loss",
            threads=1,
            quiet=[],
            **task.rows,
            **task.run[estimator],
        )
    return folder


def score(run: Path, bundle: Path, task: Task) -> dict[str, Any]:
    """What `prge eval` tells of a run's result on the test rows, kept beside the run."""
    result = run.with_name(f"{run.name}.json")
    if not result.exists():
        rows = {key: value for key, value in task.rows.items() if key != "shuffle-seed"}
        prge("eval", bundle=bundle, adapter=run, data=task.files["test"], json=result, threads=1, **rows)
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
