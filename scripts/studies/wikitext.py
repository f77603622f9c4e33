"""Fine-tune a small language model on WikiText with forward passes, and measure perplexity before and after.

    python scripts/studies/wikitext.py --model MODEL --data wikitext.json --out results --backprop

`--data` is a JSON list of passages: the first 800 are trained on, the next 100 choose the step, the others
are the test rows, read once per seed by `prge eval`. The frozen lora_a holds principal directions over
training passages (`prge export --init eva`); a seed changes the directions and the order of rows. All runs
compute the same number of rows. Calls the verbs export, run and eval as a user would and prints the table as
JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from verbs import (
    evaluate,
    evaluations,
    make_once,
    make_parser,
    report,
    summarize,
    training_summary,
    write_rows,
)

FIGURES = ("before", "after", "dev", "seconds")

TRAIN_PASSAGES, DEV_PASSAGES, DEV_LIMIT = 800, 100, 20
SHAPE: dict[str, Any] = {"sequence-length": 64, "prepend-bos": "always", "roles": ["forward", "jvp"]}
ADAPTER: dict[str, Any] = {"target-modules": "all-linear", "rank": 1, "lora-alpha": 2, "init": "eva"}
# Chosen on development rows with seed 42, of 8 queries for 2 windows and 16 for one, at 2e-3, 3e-3 and 5e-3.
STEP: dict[str, dict[str, Any]] = {
    "tangent": {"queries": 16, "batch-size": 1},
    "antithetic": {"queries": 8, "batch-size": 2, "epsilon": 1e-2},
}
ROWS_OF_A_STEP = {"tangent": 17, "antithetic": 32}
COMMON = {"optimizer": "adam", "lr-scheduler-type": "linear", "learning-rate": 3e-3}
POINTS = 8
BACKPROP: dict[str, Any] = {
    "method": "backprop-lora-fa",
    "batch_size": 16,
    "optimizer": "adam",
    "lr_scheduler_type": "linear",
    "learning_rate": 1e-2,
    "eval_steps": 100,
    "steps": 500,
}


def main() -> None:
    """Parse the flags, run every estimator, scheme and seed, and print JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--data", type=Path, required=True, help="JSON list of passages")
    parser.add_argument("--quantize", nargs="*", default=["fp32", "8da4w"])
    parser.add_argument("--estimators", nargs="*", choices=sorted(STEP), default=list(STEP))
    parser.add_argument("--rows", type=int, default=64_000, help="rows that every run computes, about")
    parser.add_argument("--backprop", action="store_true", help="train by backpropagation too (fp32)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    study = Study(arguments, split(arguments.data, arguments.out))
    results: dict[str, Any] = {}
    for scheme in arguments.quantize:
        for estimator in arguments.estimators:
            runs = [study.train(estimator, scheme, seed) for seed in arguments.seeds]
            settings = {**COMMON, **STEP[estimator]}
            results[f"{estimator}-{scheme}"] = {**summarize(runs, FIGURES), "settings": settings}
    if arguments.backprop:
        runs = [study.backpropagate(seed) for seed in arguments.seeds]
        results["backprop"] = {**summarize(runs, FIGURES), "settings": BACKPROP}
    report(results, arguments.out)


def split(data: Path, out: Path) -> dict[str, Path]:
    """Write the passages as three jsonl files in the order of the data; return them by split."""
    passages = json.loads(data.read_text(encoding="utf-8"))
    middle = TRAIN_PASSAGES + DEV_PASSAGES
    parts = {
        "train": passages[:TRAIN_PASSAGES],
        "dev": passages[TRAIN_PASSAGES:middle],
        "test": passages[middle:],
    }
    out.mkdir(parents=True, exist_ok=True)
    return {
        name: write_rows(out / f"{name}.jsonl", ({"text": text} for text in part))
        for name, part in parts.items()
    }


class Study:
    """Bundles, runs and their perplexities."""

    def __init__(self, arguments: argparse.Namespace, files: dict[str, Path]) -> None:
        self.arguments, self.out, self.files = arguments, arguments.out, files
        row_flags = {
            "overflow": "split",
            "shuffle-seed": 0,
            "dev-limit": DEV_LIMIT,
            "threads": arguments.threads,
        }
        self.rows: dict[str, Any] = {"train": files["train"], "dev": files["dev"], **row_flags}

    def train(self, estimator: str, scheme: str, seed: int) -> dict[str, Any]:
        """Export, run and score one seed with `prge`."""
        steps = self.arguments.rows // ROWS_OF_A_STEP[estimator]
        flags: dict[str, Any] = {
            "steps": steps,
            "eval-steps": steps // POINTS,
            "save-steps": steps // POINTS,
        }
        flags |= {"estimator": estimator, "seed": seed, **self.rows, **COMMON, **STEP[estimator]}
        bundle = self._bundle(scheme)
        run = make_once("run", self.out / f"run-{estimator}-{scheme}-{seed}", bundle=bundle, **flags)
        records = evaluations(run)
        best = min(records, key=lambda record: float(record["perplexity"]))
        return {"seed": seed, **self._perplexities(bundle, run, best), "seconds": records[-1]["seconds"]}

    def backpropagate(self, seed: int) -> dict[str, Any]:
        """Train the same fp32 adapter with backpropagation."""
        bundle, flags = self._bundle("fp32"), {**self.rows, "seed": seed, **BACKPROP}
        run = make_once(
            "baseline", self.out / f"backprop-{seed}", model=self.arguments.model, bundle=bundle, **flags
        )
        summary = training_summary(run)
        return {
            "seed": seed,
            **self._perplexities(bundle, run, summary["best"]),
            "seconds": summary["seconds"],
        }

    def _bundle(self, scheme: str) -> Path:
        flags: dict[str, Any] = {**SHAPE, **ADAPTER, "init-rows": self.files["train"], "quantize": scheme}
        return make_once("export", self.out / f"bundle-{scheme}", model=self.arguments.model, **flags)

    def _perplexities(self, bundle: Path, run: Path, best: dict[str, Any]) -> dict[str, Any]:
        """Return perplexities of the original model and of a run's adapter on test rows."""
        same: dict[str, Any] = {"bundle": bundle, "data": self.files["test"], "overflow": "split"}
        same |= {"threads": self.arguments.threads}
        before = evaluate(self.out / f"{bundle.name}.json", **same)
        after = evaluate(self.out / f"{run.name}.json", **same, adapter=run)
        perplexities = {
            "before": before["perplexity"],
            "after": after["perplexity"],
            "dev": best["perplexity"],
        }
        return {**perplexities, "best_step": best["step"]}


if __name__ == "__main__":
    main()
