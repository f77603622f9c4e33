"""Quantization of the frozen base: linear layers by torchao, a large embedding table by rows.

    8da8w   int8 weights per output channel, int8 dynamic activations per token
    8da4w   int4 weights in groups of 32 input channels, int8 dynamic activations per token; what rounding
            loses is compensated on rows (server_export/calibrate), or a group's scale is fitted to its
            weights alone (HQQ, Badri and Shaji 2023, without its zero points); a vocabulary head is int8:
            its errors reach the answer undamped, and it runs on the asked positions only

Both are what XNNPACK computes on integers. `lora_a` and `lora_b` stay float32.
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
# Below this an int8 table saves nothing that anybody would notice.
EMBEDDING_BYTES = 1 << 20
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class QuantizationReport:
    """What was quantized and how; `per_channel` names layers that are int8 where others are int4: too narrow
    or ragged for groups, too sensitive, or the vocabulary head. `rounding` says how int4 layers were rounded
    on how many tokens, where they were."""

    scheme: str = "fp32"
    group_size: int | None = None
    per_channel: tuple[str, ...] = ()
    embedding: str = "fp32"
    rounding: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The manifest's `quantization` block."""
        block = {**asdict(self), "per_channel": list(self.per_channel)}
        return block if self.rounding else {name: block[name] for name in block if name != "rounding"}

    def describe(self) -> str:
        """One phrase for people."""
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
        """The weight f32 [out, in] that the codes stand for."""
        groups = self.codes.float().view(*self.scale.shape, GROUP_SIZE)
        return (groups * self.scale.float().unsqueeze(2)).view(self.codes.shape)


def int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes i8 [tokens, width] and scales f32 [tokens, 1] of some vectors."""
    scales = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return torch.round(rows / scales).to(torch.int8), scales


def int8_table(vectors: Iterable[torch.Tensor], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes i8 [tokens, width] and scales f32 [tokens, 1] of so many vectors f32 that come some at a time."""
    codes, scales, start = torch.empty(0), list[torch.Tensor](), 0
    for rows in vectors:
        found, scale = int8_rows(rows)
        if not scales:
            codes = torch.empty(count, rows.shape[1], dtype=torch.int8)
        codes[start : (start := start + len(rows))] = found
        scales.append(scale)
    return codes, torch.cat(scales)


@dataclass(frozen=True)
class BundleLayers:
    """How a bundle rounded a model's layers, where that can't be made again of their weights.

    `int8` names layers that are so in `8da4w` too; `int4` has the codes of others, by name.
    """

    int8: Collection[str] = ()
    int4: Mapping[str, Int4Weight] = field(default_factory=dict)


NO_LAYERS = BundleLayers()


def quantize_layers(model: nn.Module, scheme: str, rounded: BundleLayers = NO_LAYERS) -> list[str]:
    """Quantize all linear layers of a model in place; returns those that stay int8 in an int4 scheme.

    Raises:
        BundleError: a layer of `rounded` has another shape.
    """
    layers = dict(_linear_layers(model))
    if scheme == "8da8w":
        _quantize_linear(model, set(layers), torch.int8, None)
        return []
    head = _vocabulary_head(model)
    # XNNPACK takes int4 in groups only.
    per_channel = [
        name
        for name, layer in layers.items()
        if layer.in_features % GROUP_SIZE or layer is head or _in_model(name) in rounded.int8
    ]
    known = {name for name in layers if _in_model(name) in rounded.int4}.difference(per_channel)
    _quantize_linear(model, set(layers) - set(per_channel) - known, torch.int4, GROUP_SIZE)
    _quantize_linear(model, set(per_channel), torch.int8, None)
    for name in known:
        codes, layer = rounded.int4[_in_model(name)], model.get_submodule(name)
        check_codes(_in_model(name), codes, layer.weight.shape)
        layer.weight = nn.Parameter(int4_tensor(codes), requires_grad=False)
    return per_channel


def check_codes(layer: str, codes: Int4Weight, shape: Sequence[int]) -> None:
    """Raise BundleError, `layer-of-another-shape`, if a bundle's codes aren't of a weight of this shape."""
    if tuple(codes.codes.shape) != tuple(shape):
        raise BundleError(
            f"{layer} is {[*codes.codes.shape]} in the bundle, {[*shape]} in the model",
            remedy="give the model that the bundle was exported from with --model",
            code="layer-of-another-shape",
        )


def _in_model(name: str) -> str:
    """A layer's name where no adapter is beside it."""
    return name.removesuffix(".base")


def _vocabulary_head(model: nn.Module) -> nn.Module | None:
    """The layer that returns logits, if the model has one."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if find is not None else None


def round_base(model: nn.Module, scheme: str, layers: BundleLayers = NO_LAYERS) -> None:
    """Give a model's layers and embedding table the values that a bundle has of them, as floats, in place.

    A head that shared its weight with the table has its own afterwards: they are rounded differently. GPT-2's
    Conv1D layers stay what they are.
    """
    if scheme == "fp32":
        return
    convolutions = {name: model.get_submodule(name) for name in conv1d_names(model)}
    convert_conv1d(model)
    quantize_layers(model, scheme, layers)
    dequantize_layers(model)
    for name, layer in convolutions.items():
        layer.weight.data = model.get_submodule(name).weight.detach().t().contiguous()
        replace_module(model, name, layer)
    embedding = model.get_input_embeddings()
    table = embedding.weight.detach()
    if is_large(table):
        rounded = [codes * scales for codes, scales in map(int8_rows, table.split(ROWS_AT_ONCE))]
        embedding.weight = nn.Parameter(torch.cat(rounded), requires_grad=False)


def dequantize_layers(model: nn.Module) -> None:
    """Give a model's quantized linear layers their weights as floats, in place.

    Weights keep their rounding, activations lose theirs: what is left is smooth and has derivatives.
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
    """torchao's tensor for a weight [out, in], int8 per output: `qdata`, `scale`, `zero_point`."""
    return _quantized(weight, _settings(torch.int8, None))


def int4_weight(weight: torch.Tensor) -> torch.Tensor:
    """torchao's tensor for a weight [out, in], int4 in groups of inputs; see `int8_weight`."""
    return _quantized(weight, _settings(torch.int4, GROUP_SIZE))


def int4_tensor(weight: Int4Weight) -> torch.Tensor:
    """torchao's tensor of codes that are given; see `int4_weight`."""
    like: Any = int4_weight(torch.zeros(1, GROUP_SIZE))
    _, facts = like.__tensor_flatten__()
    tensors = {
        "qdata": weight.codes,
        "scale": weight.scale,
        "zero_point": torch.zeros(weight.scale.shape, dtype=torch.int8),
    }
    whole: torch.Tensor = type(like).__tensor_unflatten__(
        tensors, facts, weight.codes.shape, weight.codes.stride()
    )
    return whole


def _quantize_linear(model: nn.Module, names: set[str], dtype: torch.dtype, group_size: int | None) -> None:
    settings = _settings(dtype, group_size)
    for name in names:
        # A new parameter: the head shares its weight with the embedding in many models.
        layer = model.get_submodule(name)
        layer.weight = nn.Parameter(_quantized(layer.weight.detach(), settings), requires_grad=False)


def _settings(dtype: torch.dtype, group_size: int | None) -> Any:
    """torchao's settings of a layer."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm

    if group_size is None:
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=PerAxis(0))
    return Int8DynamicActivationIntxWeightConfig(
        weight_dtype=dtype,
        weight_granularity=PerGroup(group_size),
        # XNNPACK stores the scales of groups so: the eager model is to have the same.
        weight_scale_dtype=torch.bfloat16,
        # Scales fitted to the weights instead of spanning the largest: int4 then costs stories260K 4 %
        # in perplexity instead of 26 %.
        intx_choose_qparams_algorithm=IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY,
    )


def _quantized(weight: torch.Tensor, settings: Any) -> torch.Tensor:
    """torchao's tensor for a weight [out, in], made of some rows after the other.

    Rows don't depend on each other, and a few stay in the processor's cache: ten times as fast.
    """
    from torchao.quantization import quantize_

    parts = []
    for rows in weight.split(ROWS_AT_ONCE):
        layer = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(rows.contiguous(), requires_grad=False)
        quantize_(layer, settings)
        parts.append(layer.weight)
    names, facts = parts[0].__tensor_flatten__()
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    whole: torch.Tensor = type(parts[0]).__tensor_unflatten__(tensors, facts, weight.shape, weight.stride())
    return whole


def is_large(table: torch.Tensor) -> bool:
    """Whether a table of embeddings is worth rounding."""
    return table.numel() * 4 >= EMBEDDING_BYTES
