"""Backpropagation through the adapter of an encoder's run, with PyTorch and PEFT: its reference.

    python scripts/backprop_sst2.py --bundle BUNDLE --run RUN --model MODEL --data SST2_FOLDER

Rows, frozen lora_a and the heads that score the training rows are those of the run; lora_B is trained by
Adam with a linear schedule. BUNDLE, of the same adapter, gives the length of development and test rows.
Prints JSON: the development curve and, with --test, the accuracy on test rows of the best epoch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch.nn import functional as F
from transformers import AutoModel

from device_runner.session.settings import RunSettings
from prge.bundle import open_bundle
from prge.contract import Contract
from prge.encoder_heads import Heads
from prge.examples import Example
from prge.journal import Journal
from prge.rows.example_building import BuildOptions, load_examples
from prge.rows.readers import Selection
from prge.rows.task import load_task
from prge.rows.tokenizer import bundle_tokenizer
from prge.sampling import row_order
from prge.settings import read_settings


def pooled(model: Any, examples: Sequence[Example], pad: int) -> torch.Tensor:
    """Mean-pooled states of the examples, f32 [examples, width]."""
    tokens = [torch.tensor(example.sequences[0].tokens) for example in examples]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(row) for row in tokens])
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    states = model(input_ids=padded, attention_mask=mask).last_hidden_state
    return (states * mask[..., None]).sum(1) / lengths[:, None]


def evaluate(model: Any, heads: Heads, examples: Sequence[Example], pad: int) -> dict[str, float]:
    """Loss and accuracy with the head that was fitted on all training rows."""
    labels = np.array([example.label for example in examples])
    by_length = np.argsort([len(example.sequences[0].tokens) for example in examples], kind="stable")
    scores = np.zeros((len(examples), len(set(labels.tolist()))))
    with torch.no_grad():
        for chunk in np.array_split(by_length, -(-len(examples) // 64)):
            states = pooled(model, [examples[i] for i in chunk], pad).numpy()
            assert heads.head is not None
            scores[chunk] = heads.head.scores(states)
    loss = F.cross_entropy(torch.tensor(scores), torch.tensor(labels)).item()
    return {"loss": loss, "accuracy": float((scores.argmax(-1) == labels).mean())}


def backprop(
    bundle_folder: Path, run: Path, model_path: str, data: Path, learning_rate: float, epochs: int, test: bool
) -> dict[str, Any]:
    """Train on the run's rows; answers the dev curve, an entry an epoch, and the best epoch's accuracies."""
    settings = read_settings(RunSettings, run / "config.yaml", "backprop")
    bundle = open_bundle(settings.bundle)
    tokenizer, task = bundle_tokenizer(bundle), load_task("sst2")
    pad, seed = tokenizer.pad_id, settings.seed

    def rows(name: str, contract: Contract, chosen: Selection) -> list[Example]:
        options = BuildOptions(overflow="truncate")
        return load_examples(data / name, tokenizer, contract, task, chosen, options, training=False)[0]

    chosen_rows = Selection(settings.train_start, settings.train_limit, settings.shuffle_seed)
    train = rows("train.tsv", bundle.contract, chosen_rows)
    longer = open_bundle(bundle_folder).contract
    dev = rows("dev.tsv", longer, Selection())
    with Journal(run / "journal.jsonl", writable=False) as journal:
        heads = Heads.from_journal(journal, bundle.contract.width)
    assert heads is not None and heads.head is not None
    # The heads are constants of the loss: row i has weight [classes, width] and a bias.
    folds = heads.cross_fitted.heads if heads.cross_fitted else (heads.head,)
    own = [folds[example.row % len(folds)] for example in train]
    weight = torch.tensor(np.stack([head.weight for head in own]))
    bias = torch.tensor(np.stack([head.bias for head in own]))
    labels = torch.tensor([example.label for example in train])

    base = AutoModel.from_pretrained(model_path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(bundle.adapter), is_trainable=True).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    batches = -(-len(train) // 16)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (epochs * batches))
    place: dict[str, Any] = {"event": "evaluation", "step": 0, "rows": 0, "seconds": 0.0}
    curve = [{**place, **evaluate(model, heads, dev, pad)}]
    best, start = (curve[0]["loss"], 0, model.state_dict()), time.perf_counter()
    for epoch in range(epochs):
        for chosen in np.array_split(row_order(seed, epoch, len(train)), batches):
            states = pooled(model, [train[i] for i in chosen], pad)
            scores = (weight[chosen] @ states[..., None])[..., 0] + bias[chosen]
            optimizer.zero_grad()
            F.cross_entropy(scores, labels[chosen]).backward()
            optimizer.step()
            decay.step()
        record = evaluate(model, heads, dev, pad)
        # A backward pass is counted as two forward passes.
        place = {**place, "step": epoch + 1, "rows": 3 * len(train) * (epoch + 1)}
        curve.append({**place, "seconds": time.perf_counter() - start, **record})
        if record["loss"] < best[0]:
            best = (record["loss"], epoch + 1, {k: v.clone() for k, v in model.state_dict().items()})
    result: dict[str, Any] = {"learning_rate": learning_rate, "best_epoch": best[1], "dev_loss": best[0]}
    result["dev_accuracy"] = curve[best[1]]["accuracy"]
    if test:
        model.load_state_dict(best[2])
        found = evaluate(model, heads, rows("test-labeled.tsv", longer, Selection()), pad)
        result["test_accuracy"], result["test_loss"] = found["accuracy"], found["loss"]
    return {**result, "curve": curve}


def main() -> None:
    """Read the flags, train, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--test", action="store_true", help="score the test rows; leave out while tuning")
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    found = backprop(
        flags.bundle, flags.run, flags.model, flags.data, flags.learning_rate, flags.epochs, flags.test
    )
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
