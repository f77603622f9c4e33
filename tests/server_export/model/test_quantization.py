"""What is quantized, what isn't, and what is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

import torch
from server_export.lower.lowering import export_graph
from server_export.model.program import STEP_METHOD, example_inputs
from torch import nn

from prge.errors import ConfigError
from server_export.model import quantization
from server_export.model.quantization import Int8Embedding
from tests.server_export.programs import build, make_export_config

torch.set_num_threads(1)


@pytest.mark.parametrize("scheme", ["int8wo", "8w", "4w", "int4wo", "INT8_WEIGHT_ONLY"])
def test_weight_only_is_refused_with_the_reason(scheme: str) -> None:
    with pytest.raises(ConfigError, match="drops their scales"):
        make_export_config("llama", quantize=scheme)


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp32, 8da8w, 8da4w"):
        make_export_config("llama", quantize="int3")


def test_layers_that_groups_do_not_divide_fall_back_and_are_listed() -> None:
    built = build("llama", model={"intermediate_size": 80}, quantize="8da4w", target_modules=["down_proj"])
    ragged = tuple(f"model.layers.{i}.mlp.down_proj" for i in range(2))
    assert built.quantization.per_channel == (*ragged, "lm_head")
    assert built.quantization.to_json()["group_size"] == 32
    layers = built.module.model.model.layers[0].mlp
    assert layers.down_proj.base.weight.block_size == (1, 80)
    assert layers.up_proj.weight.block_size == (1, 32)


def test_vocabulary_head_is_int8_beside_int4_layers() -> None:
    built = build("llama", quantize="8da4w")
    assert built.quantization.per_channel == ("lm_head",)
    head = built.module.model.lm_head.head
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


def test_only_the_base_is_quantized() -> None:
    built = build("llama", quantize="8da8w")
    layer = built.module.model.model.layers[0].self_attn.q_proj
    assert type(layer.base.weight).__name__ == "IntxUnpackedToInt8Tensor"
    assert type(layer.lora_a) is torch.Tensor
    assert layer.lora_a.dtype == torch.float32


def test_tied_head_is_quantized_and_the_embedding_is_not() -> None:
    built = build("llama", quantize="8da8w")
    model = built.module.model
    assert type(model.lm_head.head.weight).__name__ == "IntxUnpackedToInt8Tensor"
    assert type(model.get_input_embeddings().weight) is nn.Parameter
    assert built.quantization.embedding == "fp32"


def test_large_embedding_becomes_int8_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "EMBEDDING_BYTES", 0)
    for architecture in ("llama", "gemma3"):  # Gemma's embedding scales what it looks up
        plain = build(architecture)
        vectors = plain.module.model.get_input_embeddings()(torch.arange(128))
        built = build(architecture, quantize="8da8w")
        table = built.module.model.get_input_embeddings()
        assert isinstance(table, Int8Embedding)
        assert built.quantization.embedding == "int8"
        step = vectors.abs().amax(1, keepdim=True) / 127
        assert bool(((table(torch.arange(128)) - vectors).abs() <= step * 0.501).all())


@pytest.mark.parametrize("scheme", ["8da8w", "8da4w"])
def test_answers_stay_near_the_float_ones(scheme: str) -> None:
    plain = build("llama")
    built = build("llama", quantize=scheme)
    inputs = example_inputs(plain.contract)
    with torch.no_grad():
        expected, actual = plain.module(*inputs), built.module(*inputs)
    (kept,) = built.float_answers[STEP_METHOD]
    torch.testing.assert_close(kept, expected, atol=1e-5, rtol=0)
    error = float((actual - expected).pow(2).mean().sqrt() / expected.std())
    assert error < (0.1 if scheme == "8da8w" else 0.5)


def test_layers_share_zero_points_that_are_all_zero() -> None:
    built = build("llama", quantize="8da8w")
    constants = export_graph(built.module, example_inputs(built.contract)).state_dict
    zeros = [tensor for name, tensor in constants.items() if name.endswith("zero_point")]
    assert not any(bool(tensor.any()) for tensor in zeros)
    assert len({tensor.shape for tensor in zeros}) == len(zeros)
    scales = [name for name in constants if name.endswith("scale")]
    assert len(scales) > 2 * len(zeros)


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_an_activation_is_quantized_once_for_all_layers_that_read_it(architecture: str) -> None:
    built = build(architecture, quantize="8da8w")
    program = export_graph(built.module, example_inputs(built.contract))
    targets = [(str(node.target), node) for node in program.graph.nodes]
    quantized = [node.args[0] for target, node in targets if target == "torchao.quantize_affine.default"]
    assert len(set(quantized)) == len(quantized)
    layers = [
        node
        for target, node in targets
        if target == "aten.linear.default" and "dequantize" in str(node.args[1].target)
    ]
    # Of a block: queries, keys and values read one, the attention's output another.
    assert 0 < len(quantized) <= len(layers) - 2
