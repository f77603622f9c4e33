"""Which layers are quantized, and which settings are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prge.errors import BundleError, ConfigError
from server_export.export import ExportConfig
from server_export.quantize.quantization import (
    BundleLayers,
    Int4Weight,
    int4_weight,
    int8_weight,
    quantize_layers,
)
from tests.refusals import raises

torch.set_num_threads(1)


@pytest.mark.parametrize("scheme", ["int8wo", "8w", "4w", "int4wo", "INT8_WEIGHT_ONLY"])
def test_weight_only_quantization_is_refused_with_the_reason(scheme: str) -> None:
    with raises(ConfigError, "settings-unusable", containing="drops their scales"):
        ExportConfig("llama", Path("unused"), quantize=scheme)


def test_an_unknown_scheme_is_refused() -> None:
    with raises(ConfigError, "settings-unusable", containing="fp32, 8da8w, 8da4w"):
        ExportConfig("llama", Path("unused"), quantize="int3")


def test_fitted_int4_scales_have_smaller_errors_than_spanning_ones() -> None:
    weight = torch.randn(600, 64, generator=torch.Generator().manual_seed(0))
    groups = weight.reshape(600, 2, 32)
    spanning = (groups.abs().amax(2, keepdim=True) / 7.5).bfloat16().float()
    rounded = (groups / spanning).round().clamp(-8, 7) * spanning
    fitted: Any = int4_weight(weight)
    error = (fitted.dequantize() - weight).pow(2).mean()
    assert error < 0.95 * (rounded.reshape(weight.shape) - weight).pow(2).mean()


def test_layers_of_a_bundle_keep_its_codes_and_bits() -> None:
    model = nn.Sequential(nn.Linear(64, 4), nn.Linear(64, 4), nn.Linear(64, 4)).requires_grad_(False)
    weights = [layer.weight.detach().clone() for layer in model]
    codes = torch.arange(256).reshape(4, 64).remainder(16).sub(8).to(torch.int8)
    bundle_codes = Int4Weight(codes, torch.full((4, 2), 0.5).bfloat16())
    assert quantize_layers(model, "8da4w", BundleLayers({"1"}, {"2": bundle_codes})) == ["1"]
    expected = [int4_weight(weights[0]).dequantize(), int8_weight(weights[1]).dequantize(), codes * 0.5]
    assert all(
        torch.equal(layer.weight.dequantize(), expected_weight)
        for layer, expected_weight in zip(model, expected, strict=True)
    )


def test_a_layer_of_another_shape_is_refused() -> None:
    bundle_codes = Int4Weight(torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1).bfloat16())
    with raises(BundleError, "layer-of-another-shape", containing="0 is [4, 32] in the bundle, [4, 64]"):
        quantize_layers(nn.Sequential(nn.Linear(64, 4)), "8da4w", BundleLayers((), {"0": bundle_codes}))
