"""What is quantized, what isn't, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prge.errors import BundleError, ConfigError
from server_export.adapter.layers import convert_conv1d
from server_export.check.engine import loaded_method
from server_export.checkpoint.loading import prepare_model
from server_export.export import ExportConfig
from server_export.lower.program import write_program
from server_export.publishing.encoder import EncoderProgram
from server_export.quantize import quantization
from server_export.quantize.quantization import (
    BundleLayers,
    Int4Weight,
    Int8Embedding,
    QuantizationReport,
    int4_weight,
    int8_weight,
    quantize,
    quantize_layers,
)
from server_export.trace import attention
from server_export.trace.readout import at_positions
from server_export.trace.rotary import make_rotary_constant
from tests.tiny_models import DECODERS, LENGTH, SHALLOW, make_model

torch.set_num_threads(1)
INPUTS = (torch.arange(3, 3 + LENGTH).reshape(1, LENGTH), torch.tensor([[LENGTH - 1]]))


class DecoderProgram(nn.Module):
    """(tokens, position) -> logits [1, vocabulary] of that position."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        convert_conv1d(model)
        attention.register()
        model.set_attn_implementation(attention.NAME)
        make_rotary_constant(model)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(LENGTH).reshape(1, -1)
        states = self.model.model(input_ids=tokens, position_ids=numbers, use_cache=False).last_hidden_state
        return self.model.lm_head(at_positions(states, position)).reshape(1, -1)


def quantized(architecture: str, scheme: str, **changes: Any) -> tuple[Any, QuantizationReport]:
    """A tiny model as one module, quantized, and what was."""
    model = make_model(architecture, **{**SHALLOW[architecture], **changes})
    loaded = prepare_model(model, architecture, architecture in DECODERS)
    decoder = architecture in DECODERS
    program = (DecoderProgram(model) if decoder else EncoderProgram(loaded, LENGTH, "mean")).eval()
    with torch.no_grad():
        program(*inputs_of(program))
    return program, quantize(program, scheme)


def inputs_of(program: Any) -> tuple[torch.Tensor, ...]:
    return INPUTS if isinstance(program, DecoderProgram) else (INPUTS[0], torch.ones_like(INPUTS[0]))


@pytest.mark.parametrize("scheme", ["int8wo", "8w", "4w", "int4wo", "INT8_WEIGHT_ONLY"])
def test_weight_only_is_refused_with_the_reason(scheme: str) -> None:
    with pytest.raises(ConfigError, match="drops their scales"):
        ExportConfig("llama", Path("unused"), quantize=scheme)


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp32, 8da8w, 8da4w"):
        ExportConfig("llama", Path("unused"), quantize="int3")


def test_layers_that_groups_do_not_divide_fall_back_and_are_listed() -> None:
    program, report = quantized("llama", "8da4w", intermediate_size=80)
    assert report.per_channel == ("model.layers.0.mlp.down_proj", "lm_head")
    assert report.to_json()["group_size"] == 32
    layers = program.model.model.layers[0].mlp
    assert layers.down_proj.weight.block_size == (1, 80)
    assert layers.up_proj.weight.block_size == (1, 32)


def test_vocabulary_head_is_int8_beside_int4_layers() -> None:
    program, report = quantized("llama", "8da4w")
    assert report.per_channel == ("lm_head",)
    head = program.model.lm_head
    assert head.weight.target_dtype == torch.int8
    assert head.weight.block_size == (1, head.in_features)


def test_int4_scales_fit_the_weights_better_than_ones_that_span_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 600, bias=False)).requires_grad_(False)
    weight = model[0].weight.clone()
    quantization._quantize_linear(model, {"0"}, torch.int4, 32)
    groups = weight.reshape(600, 2, 32)
    spanning = (groups.abs().amax(2, keepdim=True) / 7.5).bfloat16().float()
    rounded = (groups / spanning).round().clamp(-8, 7) * spanning
    error = (model[0].weight.dequantize() - weight).pow(2).mean()
    assert error < 0.95 * (rounded.reshape(weight.shape) - weight).pow(2).mean()


def test_tied_head_is_quantized_and_the_embedding_is_not() -> None:
    program, report = quantized("llama", "8da8w")
    assert type(program.model.lm_head.weight).__name__ == "IntxUnpackedToInt8Tensor"
    assert type(program.model.get_input_embeddings().weight) is nn.Parameter
    assert report.embedding == "fp32"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])  # Gemma's embedding scales what it looks up
def test_large_embedding_becomes_int8_rows(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "EMBEDDING_BYTES", 0)
    vectors = make_model(architecture, **SHALLOW[architecture]).get_input_embeddings()(torch.arange(128))
    program, report = quantized(architecture, "8da8w")
    table = program.model.get_input_embeddings()
    assert isinstance(table, Int8Embedding)
    assert report.embedding == "int8"
    step = vectors.abs().amax(1, keepdim=True) / 127
    assert bool(((table(torch.arange(128)) - vectors).abs() <= step * 0.501).all())


@pytest.mark.parametrize("scheme", ["8da8w", "8da4w"])
def test_the_engine_answers_near_the_float_model(tmp_path: Path, scheme: str) -> None:
    plain, _ = quantized("llama", "fp32")
    program, _ = quantized("llama", scheme)
    with torch.no_grad():
        exact, expected = plain(*INPUTS), program(*INPUTS)
    write_program(tmp_path / "program.pte", {"forward": (program, INPUTS)})
    (answers,) = loaded_method(tmp_path / "program.pte", "forward", INPUTS)()
    assert float((expected - exact).pow(2).mean().sqrt() / exact.std()) < (0.1 if scheme == "8da8w" else 0.5)
    torch.testing.assert_close(answers, expected, atol=1e-3, rtol=0)


def test_layers_of_a_bundle_have_its_codes_and_bits() -> None:
    model = nn.Sequential(nn.Linear(64, 4), nn.Linear(64, 4), nn.Linear(64, 4)).requires_grad_(False)
    weights = [layer.weight.detach().clone() for layer in model]
    codes = torch.arange(256).reshape(4, 64).remainder(16).sub(8).to(torch.int8)
    known = Int4Weight(codes, torch.full((4, 2), 0.5).bfloat16())
    assert quantize_layers(model, "8da4w", BundleLayers({"1"}, {"2": known})) == ["1"]
    expected = [int4_weight(weights[0]).dequantize(), int8_weight(weights[1]).dequantize(), codes * 0.5]
    assert all(
        torch.equal(layer.weight.dequantize(), want) for layer, want in zip(model, expected, strict=True)
    )


def test_a_layer_of_another_shape_is_refused() -> None:
    known = Int4Weight(torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1).bfloat16())
    with pytest.raises(BundleError, match=r"0 is \[4, 32\] in the bundle, \[4, 64\] in the model"):
        quantize_layers(nn.Sequential(nn.Linear(64, 4)), "8da4w", BundleLayers((), {"0": known}))
