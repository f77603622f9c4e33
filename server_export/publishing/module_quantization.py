"""Quantization of a transformers model as one module, which a program for ExecuTorch's LLM runner needs.

That program is made by transformers' own integration, and not of a chain's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from prge.files.peft import PeftAdapter
from server_export.adapter.layers import convert_conv1d, replace_module
from server_export.publishing.program import check_exact, check_quantized
from server_export.quantize.quantization import (
    GROUP_SIZE,
    NO_LAYERS,
    ROWS_AT_ONCE,
    BundleLayers,
    QuantizationReport,
    dequantize_layers,
    int8_table,
    is_large,
    quantize_layers,
)


class Int8Embedding(nn.Module):
    """An embedding table of int8 codes with a scale per row.

    Args:
        vectors: f32 [some tokens, width] in order, what the replaced module gives; taken one after the other,
            so that a large table never is in memory twice.
        count: how many vectors.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, vectors: Iterable[torch.Tensor], count: int) -> None:
        super().__init__()
        codes, scales = int8_table(vectors, count)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    @property
    def weight(self) -> torch.Tensor:
        """The table as float32, for what looks at a model's input embeddings."""
        return self.codes.to(self.scales.dtype) * self.scales

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens i64 [rows, length] -> f32 [rows, length, width]."""
        return F.embedding(tokens, self.codes).to(self.scales.dtype) * F.embedding(tokens, self.scales)


class FixedLoraLinear(nn.Module):
    """A frozen linear layer with one adapter that no longer changes; `lora_a` carries alpha / rank."""

    lora_a: torch.Tensor
    lora_b: torch.Tensor

    def __init__(self, base: nn.Module, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("lora_a", lora_a)
        self.register_buffer("lora_b", lora_b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


def attach_fixed(model: nn.Module, adapter: PeftAdapter) -> None:
    """Put a trained adapter beside the layers that it names."""
    convert_conv1d(model)
    for name in adapter.lora_a:
        lora_a = torch.from_numpy(adapter.lora_a[name]) * adapter.scale_of(name)
        lora_b = torch.from_numpy(adapter.lora_b[name])
        replace_module(model, name, FixedLoraLinear(model.get_submodule(name), lora_a, lora_b))


def quantize(model: nn.Module, scheme: str, layers: BundleLayers = NO_LAYERS) -> QuantizationReport:
    """Quantize the linear layers of a model, and its embedding table if that is large, in place."""
    if scheme == "fp32":
        return QuantizationReport()
    per_channel = quantize_layers(model, scheme, layers)
    return QuantizationReport(
        scheme,
        GROUP_SIZE if scheme == "8da4w" else None,
        tuple(name.replace(".base", "") for name in per_channel),
        _quantize_embedding(model),
    )


def quantized_and_checked(
    model: nn.Module,
    scheme: str,
    reference: torch.Tensor,
    eager: Callable[[], torch.Tensor],
    lower: Callable[[], torch.Tensor],
    layers: BundleLayers = NO_LAYERS,
) -> tuple[QuantizationReport, dict[str, float]]:
    """Quantize a model in place, lower it, and compare model, module and program; returns what was found.

    Args:
        model: as it is in the module that is lowered.
        scheme: quantization of the frozen weights.
        reference: what the untouched model answers to some rows, a row first.
        eager: what the module answers to them as it is then.
        lower: writes the program; returns what it answers to them in the engine.
        layers: as the bundle has them that the adapter was trained with.

    Raises:
        BundleError: they differ by more than is allowed.
    """
    exact = eager()
    check_exact("module", exact, reference)
    quantization = quantize(model, scheme, layers)
    expected = eager()
    answers = lower()
    if scheme == "fp32":
        return quantization, check_exact("program", answers, expected)
    dequantize_layers(model)
    return quantization, check_quantized(answers, expected, eager(), exact)


def _quantize_embedding(model: nn.Module) -> str:
    """Replace a large token embedding by int8 rows; returns what the table is now."""
    embedding = model.get_input_embeddings()
    table = embedding.weight
    if not is_large(table):
        return "fp32"
    name = next(name for name, layer in model.named_modules() if layer is embedding)
    # Gemma's embedding scales its vectors: ask the module instead of reading its weight.
    vectors = (
        embedding(tokens).detach().float() for tokens in torch.arange(table.shape[0]).split(ROWS_AT_ONCE)
    )
    replace_module(model, name, Int8Embedding(vectors, len(table)))
    return "int8"
