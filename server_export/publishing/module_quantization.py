"""Quantize a transformers model as one module, for a program for ExecuTorch's LLM runner.

transformers' own integration makes this program, so it has no blocks of a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from prge.formats.peft import PeftAdapter
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
    """An embedding table of int8 codes with one scale per row.

    Args:
        vectors: outputs f32 [some tokens, width] of the replaced module, in order; read one after another, so
            that a large table is never in memory twice.
        count: number of rows.
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
        """The table as float32, for code that reads a model's input embeddings."""
        return self.codes.to(self.scales.dtype) * self.scales

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up tokens i64 [rows, length]; return f32 [rows, length, width]."""
        return F.embedding(tokens, self.codes).to(self.scales.dtype) * F.embedding(tokens, self.scales)


class FixedLoraLinear(nn.Module):
    """A frozen linear layer with a constant adapter, whose `lora_a` is scaled by alpha / rank."""

    lora_a: torch.Tensor
    lora_b: torch.Tensor

    def __init__(self, base: nn.Module, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("lora_a", lora_a)
        self.register_buffer("lora_b", lora_b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer and its adapter to x [..., in]; return [..., out]."""
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


def attach_adapter(model: nn.Module, adapter: PeftAdapter) -> None:
    """Replace the layers that a trained adapter names by layers with this adapter, in place."""
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
    """Quantize a model in place, lower it, and compare outputs of model, module and program.

    Args:
        model: the model inside the module that is lowered.
        scheme: quantization of the frozen weights.
        reference: outputs of the original model for some rows, with rows as the first dimension.
        eager: computes outputs of the module in its present state for these rows.
        lower: writes the program, and returns its outputs in the engine for these rows.
        layers: the quantized layers of the bundle that the adapter was trained with.

    Returns:
        The quantization, and differences and tolerances for the manifest.

    Raises:
        BundleError: outputs differ by more than the tolerance.
    """
    exact = eager()
    check_exact("module", exact, reference)
    quantization = quantize(model, scheme, layers)
    expected = eager()
    outputs = lower()
    if scheme == "fp32":
        return quantization, check_exact("program", outputs, expected)
    dequantize_layers(model)
    return quantization, check_quantized(outputs, expected, eager(), exact)


def _quantize_embedding(model: nn.Module) -> str:
    """Replace a large token embedding by int8 rows, in place, and return the table's scheme."""
    embedding = model.get_input_embeddings()
    table = embedding.weight
    if not is_large(table):
        return "fp32"
    name = next(name for name, layer in model.named_modules() if layer is embedding)
    # Gemma's embedding module scales its vectors, so its outputs are quantized, not its weight.
    vectors = (
        embedding(tokens).detach().float() for tokens in torch.arange(table.shape[0]).split(ROWS_AT_ONCE)
    )
    replace_module(model, name, Int8Embedding(vectors, len(table)))
    return "int8"
