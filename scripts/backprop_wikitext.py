"""What backpropagation reaches with the adapter, rows and windows of a bundle: the upper reference.

    python scripts/backprop_wikitext.py --model MODEL --bundle BUNDLE --train train.jsonl --dev dev.jsonl \\
        --out FOLDER --learning-rate 1e-2
    prge eval --bundle BUNDLE --adapter FOLDER/adapter --data test.jsonl --overflow split

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
from prge.adapter import Adapter, stack, write_peft
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
    train: Path,
    dev: Path,
    out: Path,
    seed: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    dev_limit: int | None,
    evaluate_every: int,
) -> dict[str, Any]:
    """Train with Adam and a linear schedule; keep the best step on development rows.

    Args:
        model: the folder or hub id that the bundle was exported from.
        train: jsonl file of texts; `dev` alike, of which `dev_limit` are used.
        out: folder to write: `adapter`, a PEFT folder, and `metrics.jsonl`, in the format of a run.
    """
    opened = open_bundle(bundle)
    lora = opened.manifest["lora"]
    config = ExportConfig(
        model=model,
        out=bundle,
        adapter=opened.adapter,
        estimator="antithetic",
        copies=1,
        batch_size=batch_size,
        sequence_length=opened.contract.sequence_length,
        positions=opened.contract.positions,
        seed=lora["seed"],
    )
    built = build_program(config)
    engine = EagerEngine(built.module, built.contract)
    tokenizer, options = bundle_tokenizer(opened), BuildOptions(overflow="split")
    chosen = Selection(limit=dev_limit, shuffle_seed=SHUFFLE_SEED)
    rows, _ = load_examples(train, tokenizer, engine.contract, options=options)
    dev_rows, _ = load_examples(dev, tokenizer, engine.contract, selection=chosen, options=options)
    pad = tokenizer.pad_id
    sampler = Sampler(rows, engine.contract, seed, pad=pad)
    adapter = Adapter.zeros(engine.contract.modules)
    optimizer, rates = Adam(adapter.size), schedule("linear", learning_rate, steps)
    best, best_step, best_perplexity = adapter.copy(), 0, float("inf")
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with (out / "metrics.jsonl").open("w", encoding="utf-8") as stream:
        for step in range(steps + 1):
            if step % evaluate_every == 0 or step == steps:
                perplexity = score(engine, adapter, dev_rows, pad=pad).perplexity
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
    seconds = time.monotonic() - start
    write_peft(out / "adapter", best, opened.adapter, overwrite=True)
    return {"dev": best_perplexity, "best_step": best_step, "seconds": seconds}


def main() -> None:
    """Read the flags, train, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--dev-limit", type=int, default=20, help="development passages")
    parser.add_argument("--evaluate-every", type=int, default=100)
    torch.set_num_threads(1)
    print(json.dumps(backprop(**vars(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
