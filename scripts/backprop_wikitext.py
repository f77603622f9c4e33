"""What backpropagation reaches with the adapter, rows and windows of a bundle: the upper reference.

    python scripts/backprop_wikitext.py --model MODEL --bundle BUNDLE --train train.jsonl --dev dev.jsonl \\
        --test test.jsonl --learning-rate 3e-3

The bundle's LoRA-FA program runs in PyTorch with one copy, its exact gradient goes to the same Adam that
`prge run` has. Only for fp32 bundles: integer layers have no gradient. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from device_runner.build import BuildOptions, load_examples
from device_runner.data import Selection
from device_runner.tokenizer import bundle_tokenizer
from prge.adapter import Adapter, stack
from prge.bundle import open_bundle
from prge.evaluation import score
from prge.optimizers import Adam, schedule
from prge.sampling import Sampler
from server_export.eager_engine import EagerEngine
from server_export.program import build_program
from server_export.settings import ExportConfig

# Development rows are the same as those of `prge run --shuffle-seed 0 --dev-limit N`.
SHUFFLE_SEED = 0


def backprop(
    model: str,
    bundle: Path,
    files: dict[str, Path],
    metrics: Path,
    seed: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    dev_limit: int | None,
    evaluate_every: int,
) -> dict[str, Any]:
    """Train with Adam and a linear schedule, keep the best step on dev rows, score it on test rows.

    Args:
        model: the folder or hub id that the bundle was exported from.
        files: jsonl files by split: train, dev and, optionally, test.
        metrics: file to write, in the format of a run's `metrics.jsonl`.
    """
    opened = open_bundle(bundle)
    lora = opened.manifest["lora"]
    config = ExportConfig(
        model=model,
        out=bundle,
        adapter=opened.adapter,
        copies=1,
        batch_size=batch_size,
        sequence_length=opened.contract.sequence_length,
        positions=opened.contract.positions,
        seed=lora["seed"],
    )
    built = build_program(config)
    engine = EagerEngine(built.module, built.contract)
    tokenizer, options = bundle_tokenizer(opened), BuildOptions(overflow="split")
    chosen = {"dev": Selection(limit=dev_limit, shuffle_seed=SHUFFLE_SEED)}
    rows = {
        split: load_examples(path, tokenizer, engine.contract, selection=chosen.get(split), options=options)[
            0
        ]
        for split, path in files.items()
    }
    pad = tokenizer.pad_id
    sampler = Sampler(rows["train"], engine.contract, seed, pad=pad)
    adapter = Adapter.zeros(engine.contract.modules)
    optimizer, rates = Adam(adapter.size), schedule("linear", learning_rate, steps)
    best, best_step, best_perplexity = adapter.copy(), 0, float("inf")
    start = time.monotonic()
    with metrics.open("w", encoding="utf-8") as stream:
        for step in range(steps + 1):
            if step % evaluate_every == 0 or step == steps:
                perplexity = score(engine, adapter, rows["dev"], pad=pad).perplexity
                if perplexity < best_perplexity:
                    best, best_step, best_perplexity = adapter.copy(), step, perplexity
                record = {
                    "event": "evaluation",
                    "split": "dev",
                    "step": step,
                    "perplexity": perplexity,
                    "rows": step * batch_size,
                    "seconds": time.monotonic() - start,
                }
                stream.write(json.dumps(record) + "\n")
            if step == steps:
                break
            (batch,) = sampler.batches(step)
            inputs = {**batch.inputs(1, False), **stack(adapter, 1)}
            # `weights` sum to 1 in every example, so this is the gradient of the mean loss of an example.
            exact = engine.gradients(inputs, -batch.weights / batch.examples)
            flat = np.concatenate([exact[module.input_name].ravel() for module in adapter.modules])
            optimizer.update(adapter.values, flat.astype(np.float32), rates(step))
    result = {"best_step": best_step, "dev": best_perplexity, "seconds": time.monotonic() - start}
    if "test" in rows:
        result["after"] = score(engine, best, rows["test"], pad=pad).perplexity
    return result


def main() -> None:
    """Read the flags, train, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--test", type=Path, help="scored once with the best step; leave out while tuning")
    parser.add_argument("--metrics", type=Path, default=Path("metrics.jsonl"))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--dev-limit", type=int, default=20, help="development passages")
    parser.add_argument("--evaluate-every", type=int, default=250)
    given = vars(parser.parse_args())
    files = {split: given.pop(split) for split in ("train", "dev", "test")}
    torch.set_num_threads(1)
    print(json.dumps(backprop(files={s: p for s, p in files.items() if p is not None}, **given), indent=2))


if __name__ == "__main__":
    main()
