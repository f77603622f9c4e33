"""How many rows forward-only runs need for most of backpropagation's gain: free and guided directions.

    python scripts/studies/forward_only.py --out results
    python scripts/studies/forward_only.py --model MODEL --data wikitext.json --out results --tasks wikitext

Tasks are those of init.py: the demo's, and language modelling with MODEL. One export has the bundle of a
task, `prge guide` another one, from the training rows. The gain is that of exact gradients: from the loss of
development rows before a run to its lowest. Printed are the rows that a run computed until it had the share
`--share` of it, between two evaluations in proportion, and the least loss that it came to. Each way takes the
rate, of some, that is best with the first seed. Development rows alone are read.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from init import Task, task_parser, tasks
from verbs import evaluations, prge, report, summarize

FREE = {"optimizer": "adam"}
GUIDED = {"optimizer": "adam-norm"}
WIDE = {"queries": 16, "batch-size": 1}
EVALUATIONS = 20
# Rows that forward-only runs compute, and the sizes of a step that runs had before they were guided.
ROWS = {"demo": 12_000, "wikitext": 36_000}
BEFORE = {"demo": {"queries": 4, "batch-size": 4}, "wikitext": {"queries": 8, "batch-size": 2}}


@dataclass(frozen=True)
class Way:
    """How runs are made: their settings, rates that are tried, and which part of the rows they compute."""

    name: str
    estimator: str
    settings: Mapping[str, Any]
    rates: tuple[float, ...]
    part: float = 1.0


def main() -> None:
    """Read the flags, run every task, way and seed, print JSON."""
    parser = task_parser(__doc__, "demo")
    parser.add_argument("--estimators", nargs="+", default=["tangent", "antithetic"])
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--part", type=float, default=1.0, help="of the rows, for guided runs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for task in tasks(arguments):
        exact = curve_of(task, Way("exact", "exact", {}, ()), arguments.seeds[0], task.rates["exact"][-1])
        before, lowest = exact[0][1], min(loss for _, loss in exact)
        target = before - arguments.share * (before - lowest)
        results[task.name] = {"before": before, "exact": lowest, "target": target}
        for estimator in arguments.estimators:
            for way in (
                Way("free, as before", estimator, {**FREE, **BEFORE[task.name]}, (1e-2, 3e-2)),
                Way("free", estimator, {**FREE, **WIDE}, (1e-2, 3e-2, 6e-2)),
                Way("guided", estimator, {**GUIDED, **WIDE}, (1e-2, 3e-2, 6e-2), arguments.part),
            ):
                found = measured(task, way, arguments.seeds, target)
                results[task.name][f"{estimator}, {way.name}"] = found
                report(results, arguments.out, show=False)
    report(results, arguments.out)


def measured(task: Task, way: Way, seeds: Sequence[int], target: float) -> dict[str, Any]:
    """All seeds at the rate that the first one came lowest with."""
    first, *others = seeds
    curves = {rate: curve_of(task, way, first, rate) for rate in way.rates}
    rate = min(way.rates, key=lambda each: min(loss for _, loss in curves[each]))
    runs = []
    for seed in [first, *others]:
        curve = curve_of(task, way, seed, rate)
        runs.append({"seed": seed, "rows": rows_to(curve, target), "loss": min(loss for _, loss in curve)})
    return {"learning_rate": rate, "rows": [run["rows"] for run in runs], **summarize(runs, ["loss"])}


def rows_to(curve: list[tuple[int, float]], target: float) -> int | None:
    """Rows until the loss is the target; None where it never is."""
    for (rows, loss), (next_rows, next_loss) in itertools.pairwise(curve):
        if next_loss <= target:
            return round(rows + (next_rows - rows) * (loss - target) / (loss - next_loss))
    return None


def curve_of(task: Task, way: Way, seed: int, rate: float) -> list[tuple[int, float]]:
    """Rows and loss of development rows at every evaluation of a run."""
    flags = {**task.run["exact"], "estimator": way.estimator, **way.settings}
    if way.estimator != "exact":
        of_an_example = 1 + flags["queries"] if way.estimator == "tangent" else 2 * flags["queries"]
        flags["steps"] = int(way.part * ROWS[task.name] / flags["batch-size"] / of_an_example)
        flags["evaluate-every"] = max(flags["steps"] // EVALUATIONS, 1)
    words = [way.estimator, *way.settings.values(), seed, f"{rate:g}", f"{way.part:g}"]
    source = bundle(task, way.settings.get("optimizer") == GUIDED["optimizer"])
    run = task.trained(words, source, seed=seed, learning_rate=rate, evaluate_at=[0], **flags)
    return [(record["rows"], record["loss"]) for record in evaluations(run)]


def bundle(task: Task, guided: bool) -> Path:
    """The bundle of a task, guided unless it was before."""
    plain = task.bundle(roles=["stack", "tangent", "back"])
    if not guided:
        return plain
    folder = plain.with_name(f"{plain.name}-guided")
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.copytree(plain, partial, dirs_exist_ok=True)
        rows = {key: value for key, value in task.rows.items() if key == "task"}
        prge("guide", bundle=partial, model=task.model, data=task.files["train"], **rows)
        partial.rename(folder)
    return folder


if __name__ == "__main__":
    main()
