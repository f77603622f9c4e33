"""Fine-tune a sentence encoder on SST-2 by forward passes, against backpropagation through the same adapter.

    python scripts/results_sst2.py --model MODEL --data SST2_FOLDER --out results

MODEL is a folder or hub id of all-MiniLM-L6-v2, SST2_FOLDER holds train.tsv, dev.tsv and test-labeled.tsv.
1,000 training rows of train.tsv, 500 development rows of dev.tsv, the 1,821 test rows read once per seed. A
seed changes the frozen lora_a, the directions and the order of rows. Training rows are phrases, the others
sentences, so these go through a longer program of the same adapter. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from studies import prge, summarize

SPLIT = {"shuffle_seed": 1, "train_limit": 1000}
# The layer whose gradient agrees most between training and development rows.
ADAPTER = {"target_modules": "layer.2.attention.self.value", "rank": 32, "alpha": 64}
STEP = {"queries": 16, "batch_size": 1}
# Chosen on development rows with the first seed.
TRAINING = {"optimizer": "adam", "learning_rate": 5e-3, "schedule": "linear", "epsilon": 1e-2, "clip": 0.8}
CHECKPOINTS = 250
TRAIN_LENGTH, TEST_LENGTH = 24, 64
BACKPROP_RATES = (1e-3, 3e-3, 1e-2)


def main() -> None:
    """Read the flags, run every seed, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tsv and test-labeled.tsv")
    parser.add_argument("--out", type=Path, required=True, help="folder for bundles, runs and results.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2025])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantize", default="fp32")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        # Like everything else, the rate of backpropagation is chosen with the first seed.
        rates = (runs[0]["backprop_rate"],) if runs else BACKPROP_RATES
        runs.append(study(arguments, seed, rates))
    names = ("frozen", "forward_only", "backprop")
    result = summarize(runs, [*names, *(f"{name}_dev" for name in names), "seconds"])
    means = [result[name]["mean"] for name in ("frozen", "forward_only", "backprop")]
    result["recovered"] = (means[1] - means[0]) / (means[2] - means[0])
    result["settings"] = {**SPLIT, **ADAPTER, **STEP, **TRAINING, "steps": arguments.steps}
    text = json.dumps(result, indent=2)
    (arguments.out / "results.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def study(arguments: argparse.Namespace, seed: int, rates: tuple[float, ...]) -> dict[str, Any]:
    """One seed: the frozen encoder, forward passes alone, backpropagation."""
    import torch
    from backprop_sst2 import DEV_ROWS, backprop

    out, dev = arguments.out, (arguments.data / "dev.tsv", DEV_ROWS)
    bundle, longer = (export(arguments, seed, length) for length in (TRAIN_LENGTH, TEST_LENGTH))
    run, frozen = out / f"run-{seed}", out / f"frozen-{seed}"
    flags = {**SPLIT, **TRAINING, "steps": arguments.steps, "checkpoint_every": CHECKPOINTS}
    if not (run / "final").exists():
        train = arguments.data / "train.tsv"
        flags["threads"] = arguments.threads
        prge("run", bundle=bundle, train=train, task="sst2", out=run, seed=seed, **flags)
    if not frozen.exists():
        prge("replay", run, out=frozen, step=0)
    torch.set_num_threads(arguments.threads)
    common = (longer, run, arguments.model, arguments.data)
    rate = rates[0]
    if len(rates) > 1:
        tuned = [backprop(*common, rate, epochs=4, test=False) for rate in rates]
        rate = min(tuned, key=lambda found: found["dev_loss"])["learning_rate"]
    reference = backprop(*common, rate, epochs=4, test=True)
    lines = [json.dumps(record) + "\n" for record in reference["curve"]]
    (out / f"backprop-{seed}.jsonl").write_text("".join(lines))
    curve(arguments, longer, run, seed, dev)
    test = (arguments.data / "test-labeled.tsv", None)
    return {
        "seed": seed,
        "frozen": score(arguments, longer, frozen, *test)["accuracy"],
        "forward_only": score(arguments, longer, run, *test)["accuracy"],
        "backprop": reference["test_accuracy"],
        "frozen_dev": score(arguments, longer, frozen, *dev)["loss"],
        "forward_only_dev": score(arguments, longer, run, *dev)["loss"],
        "backprop_dev": reference["dev_loss"],
        "backprop_rate": rate,
        "seconds": json.loads((run / "run.json").read_text())["train"]["seconds"],
    }


def curve(arguments: argparse.Namespace, bundle: Path, run: Path, seed: int, dev: tuple[Path, int]) -> None:
    """Write the development curve of a run: its adapter is made again from the journal at some steps."""
    steps = [arguments.steps * part // 8 for part in range(9)]
    records = []
    for step in steps:
        adapter = arguments.out / f"step-{seed}-{step}"
        if not adapter.exists():
            prge("replay", run, out=adapter, step=step)
        found = score(arguments, bundle, adapter, *dev)
        rows = step * 2 * STEP["queries"] * STEP["batch_size"]
        records.append({"event": "evaluation", "step": step, "rows": rows, **found})
    lines = [json.dumps(record) + "\n" for record in records]
    (arguments.out / f"forward-only-{seed}.jsonl").write_text("".join(lines))


def export(arguments: argparse.Namespace, seed: int, length: int) -> Path:
    """The bundle of a seed and length, exported unless it is there."""
    bundle = Path(arguments.out / f"bundle-{seed}-{length}")
    if not bundle.exists():
        flags = {**ADAPTER, **STEP, "quantize": arguments.quantize}
        prge("export", model=arguments.model, out=bundle, seed=seed, sequence_length=length, **flags)
    return bundle


def score(
    arguments: argparse.Namespace, bundle: Path, adapter: Path, data: Path, limit: int | None
) -> dict[str, Any]:
    """Loss and accuracy of an adapter on the first rows of a file."""
    result = arguments.out / f"eval-{arguments.seeds[0]}.json"
    flags = {"task": "sst2", "json": result, "threads": arguments.threads}
    if limit is not None:
        flags["limit"] = limit
    prge("eval", bundle=bundle, data=data, adapter=adapter, **flags)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


if __name__ == "__main__":
    main()
