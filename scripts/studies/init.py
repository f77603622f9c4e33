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
from collections.abc import Mapping, Sequence
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
    """A task: where its bundles and runs are, what they are told, its files, the figure that counts."""

    name: str
    out: Path
    model: str
    files: Mapping[str, Path]
    metric: str
    figures: tuple[str, ...]
    export: Mapping[str, Any]
    init: Mapping[str, Any]
    rows: Mapping[str, Any]
    run: Mapping[str, Mapping[str, Any]]
    rates: Mapping[str, tuple[float, ...]]

    def bundle(self, more: str = "", **flags: Any) -> Path:
        """A bundle, by what it has more than others."""
        return made(
            "export", self.out / f"bundle-{self.name}{more}", model=self.model, **self.export, **flags
        )

    def trained(self, words: Sequence[object], bundle: Path, **settings: Any) -> Path:
        """A run, named by words, with the step that is best on development rows."""
        folder = self.out / "-".join(map(str, ["run", self.name, *words]))
        files = {name: self.files[name] for name in ("train", "dev")}
        same = {"select": "loss", "threads": 1, "quiet": True}
        return made("run", folder, bundle=bundle, **files, **same, **self.rows, **settings)


def tasks(arguments: argparse.Namespace) -> list[Task]:
    """The tasks that were asked for."""
    found = [_demo(arguments.out)]
    if arguments.model and arguments.data:
        found.append(_wikitext(arguments.out, arguments.model, arguments.data))
    return [task for task in found if task.name in arguments.tasks]


def _demo(out: Path) -> Task:
    task = {"task": DEMO / "task.yaml"}
    return Task(
        *("demo", out, str(DEMO / "model")),
        {name: DEMO / f"{name}.jsonl" for name in ("train", "dev", "test")},
        "loss",
        ("loss", "accuracy"),
        {"target-modules": ["o_proj", "down_proj"], "sequence-length": 32},
        {"init-task": task["task"]},
        task,
        _runs({"steps": 100, "evaluate-every": 12}, {"steps": 300, "evaluate-every": 37, "queries": 4}, 4, 4),
        {"exact": (1e-2, 3e-2), "tangent": (1e-2, 3e-2)},
    )


def _wikitext(out: Path, model: str, data: Path) -> Task:
    return Task(
        *("wikitext", out, model),
        split(data, out / "rows"),
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
    for task in tasks(arguments):
        for estimator in arguments.estimators:
            for way in arguments.ways:
                results[f"{task.name}, {estimator}, {way}"] = measured(task, estimator, way, arguments.seeds)
                report(results, arguments.out, show=False)
    report(results, arguments.out)


def measured(task: Task, estimator: str, way: str, seeds: Sequence[int]) -> dict[str, Any]:
    """The runs of one way, at its rate."""
    from_rows = {**WAYS[way], "init-rows": task.files["train"], **task.init} if WAYS[way] else {}

    def bundle(seed: int) -> Path:
        seed = seeds[0] if from_rows else seed
        return task.bundle(f"-{way}-{seed}", seed=seed, roles=ROLES, **from_rows)

    def run(seed: int, rate: float) -> Path:
        words, settings = (estimator, way, seed, f"{rate:g}"), task.run[estimator]
        return task.trained(words, bundle(seed), seed=seed, learning_rate=rate, **settings)

    first, *others = seeds
    tried = {rate: best(run(first, rate), task)[task.metric] for rate in task.rates[estimator]}
    rate = min(tried, key=lambda each: tried[each])
    runs = []
    for seed in [first, *others]:
        folder = run(seed, rate)
        record = best(folder, task)
        rows = {key: value for key, value in task.rows.items() if key != "shuffle-seed"}
        given = {"bundle": bundle(seed), "adapter": folder, "threads": 1}
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


if __name__ == "__main__":
    main()
