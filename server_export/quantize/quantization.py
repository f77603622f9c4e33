"""Quantization of the frozen base: linear layers by torchao, a large embedding table by rows.

    8da8w   int8 weights per output channel, int8 dynamic activations per token
    8da4w   int4 weights in groups of 32 input channels, int8 dynamic activations per token. Rounding errors
            are compensated on calibration rows (server_export/calibrate), or the scale of a group is fitted
            to its weights (HQQ, Badri and Shaji 2023, without zero points). A vocabulary head is int8: its
            errors reach the outputs undamped, and it computes few positions

XNNPACK computes both with integers. `lora_a` and `lora_b` stay float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from prge.errors import BundleError
from server_export.adapter.layers import conv1d_names, convert_conv1d, replace_module

GROUP_SIZE = 32
# An int8 table of fewer bytes would save nothing noticeable.
EMBEDDING_BYTES = 1 << 20
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class QuantizationReport:
    """What was quantized, and how.

    Attributes:
        scheme: `fp32`, `8da8w` or `8da4w`.
        group_size: the group size of int4 weights.
        per_channel: names of layers that are int8 in an int4 scheme: their width does not fit groups, they
            are too sensitive, or they are the vocabulary head.
        embedding: the type of the embedding table.
        rounding: the method that rounded int4 layers, with its number of tokens, if they were calibrated.
    """

    scheme: str = "fp32"
    group_size: int | None = None
    per_channel: tuple[str, ...] = ()
    embedding: str = "fp32"
    rounding: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's `quantization` entry."""
        block = {**asdict(self), "per_channel": list(self.per_channel)}
        return block if self.rounding else {name: block[name] for name in block if name != "rounding"}

    def describe(self) -> str:
        """Return a short description for messages."""
        count = len(self.per_channel)
        exceptions = f", {count} layer{'s' * (count > 1)} per channel" if count else ""
        table = ", int8 embedding" if self.embedding == "int8" else ""
        return f"{self.scheme}{exceptions}{table}"


@dataclass(frozen=True)
class Int4Weight:
    """A weight [out, in] in int4: `codes` i8 [out, in] from -8 to 7, `scale` bf16 [out, in / GROUP_SIZE]."""

    codes: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the weight f32 [out, in] that the codes represent."""
        groups = self.codes.float().view(*self.scale.shape, GROUP_SIZE)
        return (groups * self.scale.float().unsqueeze(2)).view(self.codes.shape)


def int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize vectors f32 [tokens, width] to codes i8 [tokens, width] and scales f32 [tokens, 1]."""
    scales = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return torch.round(rows / scales).to(torch.int8), scales


def int8_table(vectors: Iterable[torch.Tensor], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `count` vectors that come in parts to codes i8 [count, width] and scales f32 [count, 1]."""
    codes, scales, start = torch.empty(0), list[torch.Tensor](), 0
    for rows in vectors:
        row_codes, scale = int8_rows(rows)
        if not scales:
            codes = torch.empty(count, rows.shape[1], dtype=torch.int8)
        codes[start : (start := start + len(rows))] = row_codes
        scales.append(scale)
    return codes, torch.cat(scales)


@dataclass(frozen=True)
class BundleLayers:
    """A bundle's quantized layers whose rounding can't be recomputed from the model's weights.

    Attributes:
        int8: names of layers that are int8 in `8da4w`.
        int4: the codes of other layers by name.
    """

    int8: Collection[str] = ()
    int4: Mapping[str, Int4Weight] = field(default_factory=dict)


NO_LAYERS = BundleLayers()


def quantize_layers(model: nn.Module, scheme: str, rounded: BundleLayers = NO_LAYERS) -> list[str]:
    """Quantize all linear layers of a model in place; return the names of int8 layers in an int4 scheme.

    Raises:
        BundleError: a layer of `rounded` has another shape.
    """
    layers = dict(_linear_layers(model))
    if scheme == "8da8w":
        _quantize_linear(model, set(layers), torch.int8, None)
        return []
    head = _vocabulary_head(model)
    # XNNPACK supports int4 in groups only.
    per_channel = [
        name
        for name, layer in layers.items()
        if layer.in_features % GROUP_SIZE or layer is head or _in_model(name) in rounded.int8
    ]
    from_bundle = {name for name in layers if _in_model(name) in rounded.int4}.difference(per_channel)
    _quantize_linear(model, set(layers) - set(per_channel) - from_bundle, torch.int4, GROUP_SIZE)
    _quantize_linear(model, set(per_channel), torch.int8, None)
    for name in from_bundle:
        codes, layer = rounded.int4[_in_model(name)], model.get_submodule(name)
        check_codes(_in_model(name), codes, layer.weight.shape)
        layer.weight = nn.Parameter(int4_tensor(codes), requires_grad=False)
    return per_channel


def check_codes(layer: str, codes: Int4Weight, shape: Sequence[int]) -> None:
    """Raise BundleError, `layer-of-another-shape`, unless a bundle's codes have the shape of the weight."""
    if tuple(codes.codes.shape) != tuple(shape):
        raise BundleError(
            f"{layer} is {[*codes.codes.shape]} in the bundle, {[*shape]} in the model.",
            remedy="Give the model that the bundle was exported from with --model.",
            code="layer-of-another-shape",
        )


def _in_model(name: str) -> str:
    """Return a layer's name in the model without adapters."""
    return name.removesuffix(".base")


def _vocabulary_head(model: nn.Module) -> nn.Module | None:
    """Return the layer that computes logits, if the model has one."""
    get_head = getattr(model, "get_output_embeddings", None)
    return get_head() if get_head is not None else None


def round_base(model: nn.Module, scheme: str, layers: BundleLayers = NO_LAYERS) -> None:
    """Replace a model's weights in place by the rounded values that a bundle has, as floats.

    A head that is tied to the embedding table gets a weight of its own, since the two are rounded
    differently. GPT-2's Conv1D layers remain Conv1D.
    """
    if scheme == "fp32":
        return
    conv1d_layers = {name: model.get_submodule(name) for name in conv1d_names(model)}
    convert_conv1d(model)
    quantize_layers(model, scheme, layers)
    dequantize_layers(model)
    for name, layer in conv1d_layers.items():
        layer.weight.data = model.get_submodule(name).weight.detach().t().contiguous()
        replace_module(model, name, layer)
    embedding = model.get_input_embeddings()
    table = embedding.weight.detach()
    if is_large(table):
        rounded = [codes * scales for codes, scales in map(int8_rows, table.split(ROWS_AT_ONCE))]
        embedding.weight = nn.Parameter(torch.cat(rounded), requires_grad=False)


def dequantize_layers(model: nn.Module) -> None:
    """Replace the weights of a model's quantized linear layers in place by their rounded values as floats.

    Activations are no longer rounded then, so the model is differentiable.
    """
    for _, layer in _linear_layers(model):
        restore = getattr(layer.weight, "dequantize", None)
        if type(layer.weight) is not nn.Parameter and restore is not None:
            layer.weight = nn.Parameter(restore(), requires_grad=False)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            yield name, layer


def int8_weight(weight: torch.Tensor) -> torch.Tensor:
    """Quantize a weight [out, in] to torchao's int8 tensor per output: `qdata`, `scale`, `zero_point`."""
    return _quantized(weight, _settings(torch.int8, None))


def int4_weight(weight: torch.Tensor) -> torch.Tensor:
    """Quantize a weight [out, in] to torchao's int4 tensor in groups of inputs; see `int8_weight`."""
    return _quantized(weight, _settings(torch.int4, GROUP_SIZE))


def int4_tensor(weight: Int4Weight) -> torch.Tensor:
    """Return torchao's tensor for existing codes; see `int4_weight`."""
    template: Any = int4_weight(torch.zeros(1, GROUP_SIZE))
    _, metadata = template.__tensor_flatten__()
    tensors = {
        "qdata": weight.codes,
        "scale": weight.scale,
        "zero_point": torch.zeros(weight.scale.shape, dtype=torch.int8),
    }
    tensor: torch.Tensor = type(template).__tensor_unflatten__(
        tensors, metadata, weight.codes.shape, weight.codes.stride()
    )
    return tensor


def _quantize_linear(model: nn.Module, names: set[str], dtype: torch.dtype, group_size: int | None) -> None:
    settings = _settings(dtype, group_size)
    for name in names:
        # A new parameter, because many models share the head's weight with the embedding.
        layer = model.get_submodule(name)
        layer.weight = nn.Parameter(_quantized(layer.weight.detach(), settings), requires_grad=False)


def _settings(dtype: torch.dtype, group_size: int | None) -> Any:
    """Return torchao's configuration for a layer."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm

    if group_size is None:
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=PerAxis(0))
    return Int8DynamicActivationIntxWeightConfig(
        weight_dtype=dtype,
        weight_granularity=PerGroup(group_size),
        # XNNPACK stores the scales of groups in bfloat16, and the eager model should agree with it.
        weight_scale_dtype=torch.bfloat16,
        # Fitted scales: int4 costs stories260K 4 % in perplexity, and 26 % if scales span the largest weight.
        intx_choose_qparams_algorithm=IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY,
    )


def _quantized(weight: torch.Tensor, settings: Any) -> torch.Tensor:
    """Quantize a weight [out, in] to torchao's tensor, a few rows at a time.

    Rows are independent, and a few of them stay in the processor's cache, which is ten times as fast.
    """
    from torchao.quantization import quantize_

    parts = []
    for rows in weight.split(ROWS_AT_ONCE):
        layer = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(rows.contiguous(), requires_grad=False)
        quantize_(layer, settings)
        parts.append(layer.weight)
    names, metadata = parts[0].__tensor_flatten__()
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    tensor: torch.Tensor = type(parts[0]).__tensor_unflatten__(
        tensors, metadata, weight.shape, weight.stride()
    )
    return tensor


def is_large(table: torch.Tensor) -> bool:
    """Return whether an embedding table is large enough to be quantized."""
    return table.numel() * 4 >= EMBEDDING_BYTES
