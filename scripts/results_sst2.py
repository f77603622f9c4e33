"""Fine-tune a sentence encoder on SST-2 by forward passes, against backpropagation through the same adapter.

    python scripts/results_sst2.py --model MODEL --data SST2_FOLDER --out results

MODEL is a folder or hub id of all-MiniLM-L6-v2, SST2_FOLDER holds train.tsv and test-labeled.tsv. MeZO's
protocol: 1,000 training and 500 development rows of train.tsv; the development loss chooses the step and for
backpropagation also the learning rate; the 1,821 test rows are read once per seed. A seed changes the frozen
lora_a, the directions and the order of rows. Test rows go through a longer program of the same adapter.
Prints JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from studies import evaluations, prge, summarize

SPLIT = {"shuffle_seed": 1, "train_limit": 1000, "dev_start": 1000, "dev_limit": 500}
# The layer whose gradient agrees most between training and development rows.
ADAPTER = {"target_modules": "layer.2.attention.self.value", "rank": 32, "alpha": 64}
STEP = {"queries": 16, "batch_size": 1}
# Chosen on development rows with one seed.
TRAINING = {"optimizer": "adam", "learning_rate": 5e-3, "schedule": "linear", "epsilon": 1e-2}
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
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantize", default="fp32")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        # Like everything else, the rate of backpropagation is chosen with the first seed.
        rates = (runs[0]["backprop_rate"],) if runs else BACKPROP_RATES
        runs.append(study(arguments, seed, rates))
    names = ("frozen", "forward_only", "backprop", "forward_only_dev", "backprop_dev", "seconds")
    result = summarize(runs, names)
    means = [result[name]["mean"] for name in ("frozen", "forward_only", "backprop")]
    result["recovered"] = (means[1] - means[0]) / (means[2] - means[0])
    result["settings"] = {**SPLIT, **ADAPTER, **STEP, **TRAINING, "steps": arguments.steps}
    text = json.dumps(result, indent=2)
    (arguments.out / "results.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def study(arguments: argparse.Namespace, seed: int, rates: tuple[float, ...]) -> dict[str, Any]:
    """One seed: the frozen encoder, forward passes alone, backpropagation."""
    import torch
    from backprop_sst2 import backprop

    out, train = arguments.out, arguments.data / "train.tsv"
    bundle, longer = (export(arguments, seed, length) for length in (TRAIN_LENGTH, TEST_LENGTH))
    run, frozen = out / f"run-{seed}", out / f"frozen-{seed}"
    if not (run / "final").exists():
        pace = {"steps": arguments.steps, "evaluate_every": 500, "checkpoint_every": 500, "select": "loss"}
        prge(
            "run", bundle=bundle, train=train, dev=train, task="sst2", out=run, seed=seed,
            threads=arguments.threads, **SPLIT, **TRAINING, **pace,
        )  # fmt: skip
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
    best = min(evaluations(run), key=lambda record: record["loss"])
    return {
        "seed": seed,
        "frozen": accuracy(arguments, longer, frozen),
        "forward_only": accuracy(arguments, longer, run),
        "backprop": reference["test_accuracy"],
        "forward_only_dev": best["loss"],
        "backprop_dev": reference["dev_loss"],
        "frozen_dev": evaluations(run)[0]["loss"],
        "best_step": best["step"],
        "backprop_rate": rate,
        "seconds": evaluations(run)[-1]["seconds"],
    }


def export(arguments: argparse.Namespace, seed: int, length: int) -> Path:
    """The bundle of a seed and length, exported unless it is there."""
    bundle = Path(arguments.out / f"bundle-{seed}-{length}")
    if not bundle.exists():
        flags = {**ADAPTER, **STEP, "quantize": arguments.quantize}
        prge("export", model=arguments.model, out=bundle, seed=seed, sequence_length=length, **flags)
    return bundle


def accuracy(arguments: argparse.Namespace, bundle: Path, adapter: Path) -> float:
    """Accuracy on the test rows."""
    result = arguments.out / "eval.json"
    test = arguments.data / "test-labeled.tsv"
    prge(
        "eval", bundle=bundle, data=test, task="sst2", adapter=adapter, json=result, threads=arguments.threads
    )
    return float(json.loads(result.read_text())["accuracy"])


if __name__ == "__main__":
    main()
