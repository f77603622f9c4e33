"""What `--init eva` gives: frozen lora_a from rows against random ones, exact and forward-only.

    python scripts/studies/init.py --model MODEL --data wikitext.json --out results

Two tasks: the demo's, whose model comes with the repository, and language modelling with MODEL on `--data`, a
JSON list of passages, split as wikitext.py splits them. An export takes its rows for `--init eva` from the
training rows. Each way takes the rate, of some, that is best on development rows with the first seed. A seed
gives the order of rows, the directions and the random lora_a; those from rows hardly depend on it, so that
one export has them. The best step on development rows is scored on the test rows, once a seed. Prints JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbs import DEMO, evaluations, made, parser_of, report, scored, summarize
from wikitext import split


@dataclass(frozen=True)
class Task:
    """A task: its model and files, what an export and what every reading of its rows is told."""

    model: str
    files: Mapping[str, Path]
    metric: str
    export: Mapping[str, Any]
    init: Mapping[str, Any]
    rows: Mapping[str, Any]


# By task and estimator: settings of a run, and the rates that are tried.
ARMS: Mapping[tuple[str, str], tuple[Mapping[str, Any], tuple[float, ...]]] = {
    ("wikitext", "exact"): ({"steps": 200, "evaluate_every": 25, "batch_size": 8}, (1e-2, 3e-2)),
    ("wikitext", "tangent"): (
        {"steps": 400, "evaluate_every": 100, "batch_size": 2, "queries": 8},
        (1e-2,),
    ),
    ("demo", "tangent"): ({"steps": 300, "evaluate_every": 37, "batch_size": 4, "queries": 4}, (1e-2, 3e-2)),
}
SAME = {"optimizer": "adam", "schedule": "cosine", "select": "loss", "threads": 1, "quiet": True}


def main() -> None:
    """Read the flags, run every arm with lora_a of both kinds and every seed, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--data", type=Path, required=True, help="JSON list of passages")
    parser.add_argument("--tasks", nargs="+", default=["demo", "wikitext"], choices=["demo", "wikitext"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tasks = {"demo": demo(), "wikitext": wikitext(arguments)}
    results = {
        f"{name}, {estimator}, {way}": Arm(arguments, tasks[name], name, estimator, way).measured()
        for name, estimator in ARMS
        if name in arguments.tasks
        for way in ("random", "eva")
    }
    report(results, arguments.out)


def demo() -> Task:
    """The demo's rows and model."""
    task = DEMO / "task.yaml"
    files = {name: DEMO / f"{name}.jsonl" for name in ("train", "dev", "test")}
    shape = {"target_modules": ["o_proj", "down_proj"], "sequence_length": 32}
    return Task(str(DEMO / "model"), files, "loss", shape, {"init_task": task}, {"task": task})


def wikitext(arguments: argparse.Namespace) -> Task:
    """Passages, in windows of 64 tokens."""
    shape = {"sequence_length": 64, "prepend_bos": "always"}
    files = split(arguments.data, arguments.out / "rows")
    return Task(arguments.model, files, "perplexity", shape, {}, {"overflow": "split"})


@dataclass(frozen=True)
class Arm:
    """The runs of one estimator on one task, with lora_a of one kind."""

    arguments: argparse.Namespace
    task: Task
    name: str
    estimator: str
    way: str

    def measured(self) -> dict[str, Any]:
        """All seeds, at the best rate of the first one."""
        seeds, metric = self.arguments.seeds, self.task.metric
        tried = {rate: self._best(self._run(seeds[0], rate)) for rate in ARMS[self.name, self.estimator][1]}
        rate = min(tried, key=lambda each: float(tried[each][metric]))
        runs = []
        for seed in seeds:
            run = self._run(seed, rate)
            given = {"bundle": self._bundle(seed), "adapter": run, "threads": 1, **self.task.rows}
            test = scored(run.with_name(f"{run.name}.json"), data=self.task.files["test"], **given)
            runs.append({"seed": seed, "dev": self._best(run)[metric], "test": test[metric]})
        return {"learning_rate": rate, **summarize(runs, ("dev", "test"))}

    def _best(self, run: Path) -> dict[str, Any]:
        return min(evaluations(run), key=lambda record: float(record[self.task.metric]))

    def _bundle(self, seed: int) -> Path:
        rows = {"init": "eva", "init_rows": self.task.files["train"], **self.task.init}
        seed, own = (self.arguments.seeds[0], rows) if self.way == "eva" else (seed, {})
        folder = self.arguments.out / f"bundle-{self.name}-{self.way}-{seed}"
        flags = {"seed": seed, "roles": ["tangent", "back"], **self.task.export, **own}
        return made("export", folder, model=self.task.model, **flags)

    def _run(self, seed: int, rate: float) -> Path:
        folder = self.arguments.out / f"run-{self.name}-{self.estimator}-{self.way}-{seed}-{rate:g}"
        files = {name: self.task.files[name] for name in ("train", "dev")}
        more = {"shuffle_seed": 0} if self.name == "wikitext" else {}
        flags = {**ARMS[self.name, self.estimator][0], **SAME, **self.task.rows, **more, **files}
        flags |= {"bundle": self._bundle(seed), "estimator": self.estimator}
        return made("run", folder, seed=seed, learning_rate=rate, **flags)


if __name__ == "__main__":
    main()
