"""An adapter whose lora_a are principal directions of what its layers see, and whose lora_b are zero.

    python scripts/studies/principal_adapter.py --model MODEL --data train.tsv --start 1000 --limit 1000 \
        --target-modules layer.2.attention.self.value --rank 1 --out adapter

A random lora_a catches rank / width of a layer's input; its first principal directions catch most of it. So
a few trained numbers do as much as many, and an estimate of their gradient from forward passes has that much
less noise (the same idea as EVA, Paischer et al., arXiv 2410.07170, without centring). It takes forward
passes over texts without labels, on the workstation: texts that may be there, not the ones to train on.
`prge export --adapter` starts from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from prge.rows.readers import Selection, read_rows, select_rows
from prge.rows.task import load_task


def principal_directions(
    model: Any, batches: Sequence[dict[str, torch.Tensor]], layer: nn.Module, rank: int
) -> torch.Tensor:
    """Leading directions of a layer's inputs, f32 [rank, in], scaled to a mean square of 1 along each."""
    inputs: list[torch.Tensor] = []

    def keep(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs.append(arguments[0])

    handle = layer.register_forward_pre_hook(keep)
    products, tokens = torch.zeros(()), 0
    with torch.no_grad():
        for batch in batches:
            inputs.clear()
            model(**batch)
            states = inputs[0][batch["attention_mask"].bool()].double()
            products, tokens = products + states.T @ states, tokens + len(states)
    handle.remove()
    values, vectors = torch.linalg.eigh(products / tokens)
    leading = vectors[:, -rank:].T.flip(0) / values[-rank:].flip(0).sqrt().unsqueeze(1)
    # The sign of an eigenvector is arbitrary: the same one on every machine.
    return (leading * leading.sum(1, keepdim=True).sign()).float().contiguous()


def write(arguments: argparse.Namespace) -> None:
    """Read the texts, run the model over them, write the PEFT folder."""
    architectures = AutoConfig.from_pretrained(arguments.model).architectures or []
    is_decoder = any(name.endswith("ForCausalLM") for name in architectures)
    kind = AutoModelForCausalLM if is_decoder else AutoModel
    model = kind.from_pretrained(arguments.model, dtype=torch.float32).eval()
    chosen = Selection(arguments.start, arguments.limit, arguments.shuffle_seed)
    rows = select_rows(read_rows(arguments.data), chosen)
    if arguments.task:
        task = load_task(arguments.task)
        texts = [task.encoder_text(row.fields) for row in rows]
    else:
        texts = [str(row.fields["text"]) for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    encoded = tokenizer(texts, truncation=True, max_length=arguments.sequence_length)["input_ids"]
    batches = []
    for start in range(0, len(encoded), 50):
        tokens = [torch.tensor(row) for row in encoded[start : start + 50]]
        padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        lengths = torch.tensor([len(row) for row in tokens])
        mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
        batches.append({"input_ids": padded, "attention_mask": mask})
    targets = arguments.target_modules
    config = LoraConfig(
        r=arguments.rank,
        lora_alpha=arguments.rank,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
    )
    peft_model = get_peft_model(model, config)
    for module in peft_model.modules():
        if hasattr(module, "lora_A"):
            directions = principal_directions(model, batches, module.base_layer, arguments.rank)
            module.lora_A["default"].weight.data.copy_(directions)
    peft_model.save_pretrained(arguments.out)


def main() -> None:
    """Read the flags and write the adapter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--task", help="task whose text the rows hold; without one, their column text")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--shuffle-seed", type=int)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--target-modules", nargs="+", required=True)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    write(parser.parse_args())


if __name__ == "__main__":
    main()
