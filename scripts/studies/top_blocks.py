"""What it costs in accuracy to adapt the top blocks of a sentence encoder alone, on SST-2.

    python scripts/studies/top_blocks.py --model MODEL --data SST2_FOLDER --out results --blocks 1 2 3 6

MODEL is a folder or hub id of all-MiniLM-L6-v2 or alike, SST2_FOLDER holds train.tsv, dev.tsv and
test-labeled.tsv. Gradients are exact (`--estimator exact`), so that what differs is where the adapters are:
rank 8 on the query and value of the top k blocks. Each number of blocks has its rate of `--rates` chosen on
development rows with a seed that is not reported; every run takes its best step on them, test rows are read
once a run. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from verbs import evaluations, prge, summarize

ROWS = 1000
SEARCH_SEED = 7
EPOCHS = 3
BATCH = 16
SHAPE = {"sequence-length": 64, "target-modules": ["query", "value"], "rank": 8}
FIGURES = ("dev_loss", "dev_accuracy", "test_loss", "test_accuracy", "step_milliseconds")


def main() -> None:
    """Read the flags, run every number of blocks and seed, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tsv and test-labeled.tsv")
    parser.add_argument("--out", type=Path, required=True, help="folder for bundles, runs and results.json")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 3, 6])
    parser.add_argument("--seeds", type=int, nargs="+", default=[23, 29, 31])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--quantize", default="8da8w")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for blocks in arguments.blocks:
        bundle = export(arguments, blocks)
        tried = {rate: run(arguments, bundle, blocks, SEARCH_SEED, rate) for rate in arguments.rates}
        rate = min(tried, key=lambda rate: best(tried[rate])["loss"])
        runs = [scored(arguments, bundle, blocks, seed, rate) for seed in arguments.seeds]
        search = {str(tried_rate): best(folder)["loss"] for tried_rate, folder in tried.items()}
        results[f"top:{blocks}"] = {**summarize(runs, FIGURES), "learning_rate": rate, "search": search}
    text = json.dumps(results, indent=2)
    (arguments.out / "results.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def export(arguments: argparse.Namespace, blocks: int) -> Path:
    """The bundle with adapters in the top blocks, exported unless it is there."""
    bundle = Path(arguments.out / f"bundle-{blocks}")
    if not bundle.exists():
        flags = {**SHAPE, "roles": ["stack", "back"], "adapt-layers": f"top:{blocks}"}
        prge("export", model=arguments.model, out=bundle, quantize=arguments.quantize, **flags)
    return bundle


def run(arguments: argparse.Namespace, bundle: Path, blocks: int, seed: int, rate: float) -> Path:
    """A finished run, done unless it was before."""
    folder = Path(arguments.out / f"run-{blocks}-{rate:g}-{seed}")
    steps = EPOCHS * -(-ROWS // BATCH)
    if not (folder / "final").exists():
        rows = {"train": arguments.data / "train.tsv", "dev": arguments.data / "dev.tsv", "task": "sst2"}
        chosen = {"train_limit": ROWS, "shuffle_seed": 42, "select": "loss", "seed": seed}
        step = {"estimator": "exact", "batch_size": BATCH}
        length = {"steps": steps, "evaluate_every": steps // 6, "learning_rate": rate, "schedule": "linear"}
        prge("run", bundle=bundle, out=folder, threads=arguments.threads, **rows, **chosen, **step, **length)
    return folder


def best(folder: Path) -> dict[str, Any]:
    """The evaluation of a run's best step on development rows."""
    return min(evaluations(folder), key=lambda record: record["loss"])


def scored(
    arguments: argparse.Namespace, bundle: Path, blocks: int, seed: int, rate: float
) -> dict[str, Any]:
    """One reported run: its figures on development and test rows."""
    folder = run(arguments, bundle, blocks, seed, rate)
    result = folder.with_name(f"{folder.name}-test.json")
    if not result.exists():
        test = {"data": arguments.data / "test-labeled.tsv", "task": "sst2", "threads": arguments.threads}
        prge("eval", bundle=bundle, adapter=folder, json=result, **test)
    test_found, dev = json.loads(result.read_text(encoding="utf-8")), best(folder)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [record["engine_seconds"] for record in records if record["event"] == "step"]
    return {
        "seed": seed,
        "dev_loss": dev["loss"],
        "dev_accuracy": dev["accuracy"],
        "test_loss": test_found["loss"],
        "test_accuracy": test_found["accuracy"],
        "step_milliseconds": 1000 * statistics.median(seconds),
        "best_step": dev["step"],
    }


if __name__ == "__main__":
    main()
