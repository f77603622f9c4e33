"""Adapt a small language model to WikiText by forward passes, and measure token perplexity before and after.

    python scripts/studies/wikitext.py --model MODEL --data wikitext.json --out results --backprop

`--data` is a JSON list of passages: the first 800 are trained on, the next 100 choose the step, the others
are the test rows, read once per seed by `prge eval`. The frozen lora_a are principal directions over training
passages (`prge export --init eva`); a seed changes the directions and the order of rows. All runs compute the
same number of rows. Calls the verbs export, run and eval as a user would and prints the table as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from verbs import evaluations, prge, summarize

FIGURES = ("before", "after", "dev", "seconds")

TRAIN_PASSAGES, DEV_PASSAGES, DEV_LIMIT = 800, 100, 20
SHAPE: dict[str, Any] = {"sequence-length": 64, "prepend-bos": "always", "roles": ["stack", "tangent"]}
ADAPTER: dict[str, Any] = {"target-modules": "all-linear", "rank": 1, "alpha": 2, "init": "eva"}
# Chosen on development rows with seed 42, of 8 queries for 2 windows and 16 for one, at 2e-3, 3e-3 and 5e-3.
STEP = {
    "tangent": {"queries": 16, "batch-size": 1},
    "antithetic": {"queries": 8, "batch-size": 2},
}
ROWS_OF_A_STEP = {"tangent": 17, "antithetic": 32}
COMMON = {"optimizer": "adam", "schedule": "linear", "learning-rate": 3e-3}
TRAINING: dict[str, dict[str, Any]] = {"tangent": {}, "antithetic": {"epsilon": 1e-2}}
POINTS = 8
BACKPROP: dict[str, Any] = {
    "method": "backprop-lora-fa",
    "batch_size": 16,
    "optimizer": "adam",
    "schedule": "linear",
    "learning_rate": 1e-2,
    "evaluate_every": 100,
}


def main() -> None:
    """Read the flags, run every estimator, scheme and seed, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--data", type=Path, required=True, help="JSON list of passages")
    parser.add_argument("--out", type=Path, required=True, help="folder for bundles, runs and results.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    parser.add_argument("--quantize", nargs="*", default=["fp32", "8da4w"])
    parser.add_argument(
        "--estimators", nargs="*", choices=sorted(TRAINING), default=["tangent", "antithetic"]
    )
    parser.add_argument("--rows", type=int, default=64_000, help="rows that every run computes, about")
    parser.add_argument("--backprop", action="store_true", help="train by backpropagation too (fp32)")
    parser.add_argument("--backprop-steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    files = split(arguments.data, arguments.out)
    results: dict[str, Any] = {}
    for scheme in arguments.quantize:
        for estimator in arguments.estimators:
            runs = [train(arguments, estimator, scheme, seed, files) for seed in arguments.seeds]
            results[f"{estimator}-{scheme}"] = {
                **summarize(runs, FIGURES),
                "settings": {**STEP[estimator], **COMMON, **TRAINING[estimator]},
            }
    if arguments.backprop:
        runs = [reference(arguments, seed, files) for seed in arguments.seeds]
        results["backprop"] = {**summarize(runs, FIGURES), "settings": BACKPROP}
    text = json.dumps(results, indent=2)
    (arguments.out / "results.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def split(data: Path, out: Path) -> dict[str, Path]:
    """Write the passages as three jsonl files, in the order of the data; returns them by split."""
    passages = json.loads(data.read_text(encoding="utf-8"))
    middle = TRAIN_PASSAGES + DEV_PASSAGES
    parts = {
        "train": passages[:TRAIN_PASSAGES],
        "dev": passages[TRAIN_PASSAGES:middle],
        "test": passages[middle:],
    }
    out.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, part in parts.items():
        files[name] = out / f"{name}.jsonl"
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in part]
        files[name].write_text("".join(lines), encoding="utf-8")
    return files


def export(arguments: argparse.Namespace, scheme: str, files: dict[str, Path]) -> Path:
    """The bundle of a scheme, exported unless it is there."""
    bundle = Path(arguments.out / f"bundle-{scheme}")
    if not bundle.exists():
        flags = {**SHAPE, **ADAPTER, "init-rows": files["train"]}
        prge("export", model=arguments.model, out=bundle, quantize=scheme, **flags)
    return bundle


def train(
    arguments: argparse.Namespace, estimator: str, scheme: str, seed: int, files: dict[str, Path]
) -> dict[str, Any]:
    """Export, run unless it was done, and score one seed by `prge`."""
    bundle = export(arguments, scheme, files)
    run = arguments.out / f"run-{estimator}-{scheme}-{seed}"
    steps = arguments.rows // ROWS_OF_A_STEP[estimator]
    chosen = {"overflow": "split", "shuffle-seed": 0, "dev-limit": DEV_LIMIT}
    every = {"evaluate-every": steps // POINTS, "checkpoint-every": steps // POINTS}
    length = {"steps": steps, "seed": seed, "threads": arguments.threads}
    step = {"estimator": estimator, **STEP[estimator]}
    flags = {**chosen, **every, **step, **COMMON, **TRAINING[estimator], **length}
    if not (run / "final").exists():
        prge("run", bundle=bundle, train=files["train"], dev=files["dev"], out=run, **flags)
    records = evaluations(run)
    best = min(records, key=lambda record: record["perplexity"])
    return {
        "seed": seed,
        "before": evaluate(arguments, bundle, files["test"]),
        "after": evaluate(arguments, bundle, files["test"], run),
        "dev": best["perplexity"],
        "best_step": best["step"],
        "seconds": records[-1]["seconds"],
    }


def evaluate(arguments: argparse.Namespace, bundle: Path, data: Path, adapter: Path | None = None) -> float:
    """Token perplexity of an adapter, a run's or a PEFT folder, or of the model as it came."""
    result = arguments.out / "eval.json"
    flags = {} if adapter is None else {"adapter": adapter}
    prge("eval", bundle=bundle, data=data, overflow="split", threads=arguments.threads, json=result, **flags)
    return float(json.loads(result.read_text(encoding="utf-8"))["perplexity"])


def reference(arguments: argparse.Namespace, seed: int, files: dict[str, Path]) -> dict[str, Any]:
    """Train the same fp32 adapter by backpropagation."""
    bundle = export(arguments, "fp32", files)
    out = arguments.out / f"backprop-{seed}"
    chosen = {"overflow": "split", "shuffle-seed": 0, "dev-limit": DEV_LIMIT}
    length = {"steps": arguments.backprop_steps, "seed": seed, "threads": arguments.threads}
    rows = {"train": files["train"], "dev": files["dev"], **chosen}
    if not (out / "final").exists():
        prge("baseline", model=arguments.model, bundle=bundle, out=out, **rows, **length, **BACKPROP)
    found = json.loads((out / "run.json").read_text(encoding="utf-8"))["train"]
    return {
        "seed": seed,
        "before": evaluate(arguments, bundle, files["test"]),
        "after": evaluate(arguments, bundle, files["test"], out),
        "dev": found["best"]["perplexity"],
        "best_step": found["best"]["step"],
        "seconds": found["seconds"],
    }


if __name__ == "__main__":
    main()
