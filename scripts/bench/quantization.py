"""Measure quantization recipes: loss, bits, seconds and memory of the export.

    python scripts/bench/quantization.py --model MODEL --data dev.jsonl final.jsonl --json quantization.json

A recipe is an export of the model and a `prge eval` of its bundle on each file of rows, both in processes of
their own. `q4_0` (llama.cpp's, by the package gguf) and `torchao` (its default int4 weights) store rounded
weights of the blocks' layers as floats, so their activations stay float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reports import make_parser, report
from timing import export, folder_bytes

from prge.cli.subprocesses import verb_command
from prge.formats.bundle import read_manifest
from server_export.checkpoint.loading import load_model
from server_export.checkpoint.tokenization import load_tokenizer
from server_export.quantize.quantization import GROUP_SIZE

_SCALE_BITS = 16 / GROUP_SIZE
RECIPES: dict[str, list[str]] = {
    "fp32": ["--quantize", "fp32"],
    "8da8w": ["--quantize", "8da8w"],
    "8da4w nearest": ["--quantize", "8da4w", "--rounding", "nearest"],
    "8da4w gptq": ["--quantize", "8da4w", "--weight-bits", "4"],
    "8da4w gptq, some int8": ["--quantize", "8da4w"],
}


def q4_0(weight: torch.Tensor) -> torch.Tensor:
    """Round a weight f32 [out, in] as llama.cpp's Q4_0."""
    import gguf

    codes = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)
    return torch.from_numpy(gguf.dequantize(codes, gguf.GGMLQuantizationType.Q4_0))


def torchao_int4(weight: torch.Tensor) -> torch.Tensor:
    """Round a weight f32 [out, in] as torchao does for XNNPACK by default."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(
        layer,
        Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=PerGroup(GROUP_SIZE)
        ),
    )
    rounded: torch.Tensor = layer.weight.dequantize()
    return rounded


def write_rounded_model(model: str, rounded: Callable[[torch.Tensor], torch.Tensor], out: Path) -> None:
    """Write a model with rounded weights in the blocks' layers."""
    loaded = load_model(model).model
    head = loaded.get_output_embeddings()
    for layer in loaded.modules():
        if isinstance(layer, torch.nn.Linear) and layer is not head:
            layer.weight.data = rounded(layer.weight.data)
    loaded.save_pretrained(out)
    load_tokenizer(model, None).save_pretrained(out)


def measure(arguments: argparse.Namespace, model: Path, folder: Path, flags: list[str]) -> dict[str, Any]:
    """Export and score one recipe."""
    bundle = folder / "bundle"
    figures: dict[str, Any] = export(model, bundle, "--roles", *arguments.roles, *flags)
    quantization = read_manifest(bundle)["quantization"]
    bits = {"fp32": 32.0, "8da8w": 8.0}.get(quantization["scheme"])
    if bits is None:
        code_bits = quantization.get("rounding", {}).get("weight_bits", 4.0)
        bits = code_bits + _SCALE_BITS * (8 - code_bits) / 4
    figures |= {"bits": bits, "weights_bytes": folder_bytes(bundle / "weights")}
    for data in arguments.data:
        result = folder / "eval.json"
        command = verb_command("eval", bundle, "--data", data, "--json", result)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        scores = json.loads(result.read_text())
        figures[data.stem] = {name: scores[name] for name in ("loss", "perplexity")}
    return figures


def main() -> None:
    """Parse the flags, measure every recipe and print JSON."""
    parser = make_parser(__doc__, model="", data=[Path()], roles=["forward"])
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, flags in RECIPES.items():
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = measure(arguments, Path(arguments.model), Path(folder), flags)
    for name, rounding in (("q4_0", q4_0), ("torchao", torchao_int4)):
        with tempfile.TemporaryDirectory() as folder:
            write_rounded_model(arguments.model, rounding, Path(folder, "model"))
            figures[name] = measure(arguments, Path(folder, "model"), Path(folder), RECIPES["fp32"])
            figures[name]["bits"] = 4 + _SCALE_BITS
    report(figures, arguments)


if __name__ == "__main__":
    main()
