"""Adapt a small language model to WikiText by forward passes, and measure token perplexity before and after.

    python scripts/results_wikitext.py --model MODEL --data wikitext.json --out results --backprop

`--data` is a JSON list of passages: the first 800 are trained on, the next 100 choose the step, the others
are the test rows, read once per seed by `prge eval`. A seed changes the frozen lora_a, the directions and the
order of rows. Calls the verbs export, run and eval as a user would and prints the table as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from studies import evaluations, prge, summarize

FIGURES = ("before", "after", "dev", "seconds")

TRAIN_PASSAGES, DEV_PASSAGES, DEV_LIMIT = 800, 100, 20
SHAPE = {"sequence-length": 64, "positions": 63, "prepend-bos": "always"}
ADAPTER = {"target-modules": "all-linear", "rank": 8, "alpha": 16}
STEP = {"estimator": "antithetic", "queries": 8, "batch-size": 2}
# Chosen on development rows with seed 42.
TRAINING: dict[str, dict[str, Any]] = {
    "fp32": {"learning-rate": 1e-3, "epsilon": 1e-2},
    "8da4w": {"learning-rate": 1e-3, "epsilon": 2e-2},
}
COMMON = {"optimizer": "adam", "schedule": "linear", "evaluate-every": 250, "checkpoint-every": 250}
BACKPROP: dict[str, Any] = {"batch_size": 16, "learning_rate": 1e-2, "evaluate_every": 100}


def main() -> None:
    """Read the flags, run every scheme and seed, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--data", type=Path, required=True, help="JSON list of passages")
    parser.add_argument("--out", type=Path, required=True, help="folder for bundles, runs and results.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    parser.add_argument("--quantize", nargs="*", choices=sorted(TRAINING), default=["fp32", "8da4w"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--backprop", action="store_true", help="train by backpropagation too (fp32)")
    parser.add_argument("--backprop-steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    files = split(arguments.data, arguments.out)
    results: dict[str, Any] = {}
    for scheme in arguments.quantize:
        runs = [train(arguments, scheme, seed, files) for seed in arguments.seeds]
        results[scheme] = {
            **summarize(runs, FIGURES),
            "settings": {**ADAPTER, **STEP, **COMMON, **TRAINING[scheme]},
        }
    if arguments.backprop:
        runs = [reference(arguments, seed, files) for seed in arguments.seeds]
        results["backprop"] = {**summarize(runs, FIGURES), "settings": {**ADAPTER, **BACKPROP}}
    text = json.dumps(results, indent=2)
    (arguments.out / "results.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def split(data: Path, out: Path) -> dict[str, Path]:
    """Write the passages as three jsonl files, in the order of the data; answers them by split."""
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


def export(arguments: argparse.Namespace, scheme: str, seed: int) -> Path:
    """The bundle of a scheme and seed, exported unless it is there."""
    bundle = Path(arguments.out / f"bundle-{scheme}-{seed}")
    if not bundle.exists():
        flags = {**SHAPE, **ADAPTER, **STEP, "quantize": scheme, "seed": seed}
        prge("export", model=arguments.model, out=bundle, **flags)
    return bundle


def train(arguments: argparse.Namespace, scheme: str, seed: int, files: dict[str, Path]) -> dict[str, Any]:
    """Export, run unless it was done, and score one seed by `prge`."""
    bundle = export(arguments, scheme, seed)
    run = arguments.out / f"run-{scheme}-{seed}"
    chosen = {"overflow": "split", "shuffle-seed": 0, "dev-limit": DEV_LIMIT}
    length = {"steps": arguments.steps, "seed": seed, "threads": arguments.threads}
    flags = {**chosen, **COMMON, **TRAINING[scheme], **length}
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
    import torch
    from backprop_wikitext import backprop

    torch.set_num_threads(arguments.threads)
    bundle = export(arguments, "fp32", seed)
    out = arguments.out / f"backprop-{seed}"
    length = {"seed": seed, "steps": arguments.backprop_steps, "dev_limit": DEV_LIMIT}
    found = backprop(arguments.model, bundle, files["train"], files["dev"], out, **length, **BACKPROP)
    return {
        "seed": seed,
        "before": evaluate(arguments, bundle, files["test"]),
        "after": evaluate(arguments, bundle, files["test"], out / "adapter"),
        **found,
    }


if __name__ == "__main__":
    main()
