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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbs import DEMO, evaluations, made, parser_of, report, scored, summarize
from wikitext import split

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
    found = {"demo": _demo()}
    if arguments.model and arguments.data:
        found["wikitext"] = _wikitext(arguments.model, split(arguments.data, arguments.out / "rows"))
    return {name: found[name] for name in arguments.tasks if name in found}


def _demo() -> Task:
    task = {"task": DEMO / "task.yaml"}
    return Task(
        str(DEMO / "model"),
        {name: DEMO / f"{name}.jsonl" for name in ("train", "dev", "test")},
        "loss",
        ("loss", "accuracy"),
        {"target-modules": ["o_proj", "down_proj"], "sequence-length": 32},
        {"init-task": task["task"]},
        task,
        _runs({"steps": 100, "evaluate-every": 12}, {"steps": 300, "evaluate-every": 37, "queries": 4}, 4, 4),
        {"exact": (1e-2, 3e-2), "tangent": (1e-2, 3e-2)},
    )


def _wikitext(model: str, files: Mapping[str, Path]) -> Task:
    return Task(
        model,
        files,
        "perplexity",
        ("perplexity",),
        {"sequence-length": 64, "prepend-bos": "always"},
        {},
        {"overflow": "split", "shuffle-seed": 0},
        _runs(
            {"steps": 200, "evaluate-every": 25}, {"steps": 400, "evaluate-every": 100, "queries": 8}, 8, 2
        ),
        {"exact": (1e-2, 3e-2), "tangent": (1e-2,)},
    )


def _runs(exact: dict[str, Any], tangent: dict[str, Any], *rows: int) -> dict[str, dict[str, Any]]:
    """What runs are told by estimator, with their rows a step."""
    same = {"optimizer": "adam", "schedule": "cosine"}
    return {
        name: {**same, "estimator": name, "batch-size": size, **more}
        for name, size, more in zip(("exact", "tangent"), rows, (exact, tangent), strict=True)
    }


def task_parser(description: str | None, *names: str) -> argparse.ArgumentParser:
    """A parser of a study of these tasks."""
    parser = parser_of(description)
    parser.add_argument("--model", help="folder or hub id of the model for --data")
    parser.add_argument("--data", type=Path, help="JSON list of passages")
    parser.add_argument("--tasks", nargs="+", default=[*names], choices=["demo", "wikitext"])
    return parser


def main() -> None:
    """Read the flags, run every task, way, estimator and seed, print JSON."""
    parser = task_parser(__doc__, "demo", "wikitext")
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=list(WAYS))
    parser.add_argument("--estimators", nargs="+", default=["exact", "tangent"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name, task in tasks(arguments).items():
        for estimator in arguments.estimators:
            for way in arguments.ways:
                results[f"{name}, {estimator}, {way}"] = measured(arguments, name, task, estimator, way)
                report(results, arguments.out, show=False)
    report(results, arguments.out)


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
        rows = {key: value for key, value in task.rows.items() if key != "shuffle-seed"}
        given = {"bundle": bundle(arguments, name, task, way, seed), "adapter": folder, "threads": 1}
        test = scored(folder.with_name(f"{folder.name}.json"), data=task.files["test"], **given, **rows)
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
    """The bundle of a way and seed."""
    seed = arguments.seeds[0] if WAYS[way] else seed
    rows = {**WAYS[way], "init-rows": task.files["train"], **task.init} if WAYS[way] else {}
    flags = {"model": task.model, "seed": seed, "roles": ROLES, **task.export, **rows}
    return made("export", arguments.out / f"bundle-{name}-{way}-{seed}", **flags)


def trained(
    arguments: argparse.Namespace, name: str, task: Task, estimator: str, way: str, seed: int, rate: float
) -> Path:
    """A run."""
    folder = arguments.out / f"run-{name}-{estimator}-{way}-{seed}-{rate:g}"
    source = bundle(arguments, name, task, way, seed)
    return run_of(folder, source, task, seed=seed, learning_rate=rate, **task.run[estimator])


def run_of(folder: Path, bundle: Path, task: Task, **settings: Any) -> Path:
    """A run of a task, with the step that is best on development rows."""
    files = {name: task.files[name] for name in ("train", "dev")}
    same = {"select": "loss", "threads": 1, "quiet": True}
    return made("run", folder, bundle=bundle, **files, **same, **task.rows, **settings)


if __name__ == "__main__":
    main()
