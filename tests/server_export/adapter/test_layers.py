"""Target modules, the initial matrices of adapted layers, and the fit of an existing adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import constants
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from prge.errors import AdapterError, ConfigError
from server_export.adapter.layers import (
    convert_conv1d,
    default_target_modules,
    initial_lora_a,
    match_target_modules,
    usual_target_modules,
)
from server_export.bundle import write_adapter
from tests.refusals import raises
from tests.server_export.model.starts import start
from tests.tiny_models import ARCHITECTURES, make_model


def peft_choice(architecture: str, targets: str | list[str]) -> list[str]:
    model = get_peft_model(make_model(architecture), LoraConfig(r=2, target_modules=targets))
    names = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    return [name.removeprefix("base_model.model.") for name in names]


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("llama", ["q_proj", "v_proj"]),
        ("llama", ["layers.1.self_attn.k_proj", "down_proj"]),
        ("llama", r".*layers\.0.*\.(gate|up)_proj"),
        ("llama", "all-linear"),
        ("gemma3", "all-linear"),
        ("phi3", ["qkv_proj", "gate_up_proj"]),
        ("gpt2", ["c_attn"]),
        ("gpt2", "all-linear"),
        ("distilbert", "all-linear"),
    ],
)
def test_target_modules_match_as_in_peft(architecture: str, targets: str | list[str]) -> None:
    model = make_model(architecture)
    convert_conv1d(model)
    assert match_target_modules(model, targets) == peft_choice(architecture, targets)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_default_targets(architecture: str) -> None:
    model = make_model(architecture)
    convert_conv1d(model)
    assert match_target_modules(model, default_target_modules(model))


def test_all_linear_layers_of_the_blocks_are_the_default_without_a_usual_choice() -> None:
    model = make_model("persimmon")
    assert usual_target_modules(model) is None and usual_target_modules(make_model("llama"))
    names = match_target_modules(model, default_target_modules(model))
    layers = ("self_attn.query_key_value", "self_attn.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    assert names == [f"model.layers.{block}.{layer}" for block in range(2) for layer in layers]
    assert names == peft_choice("persimmon", default_target_modules(model))


@pytest.mark.parametrize(
    ("architecture", "apart"), [("gemma4", "per_layer_model_projection"), ("albert", "in")]
)
def test_layers_before_the_blocks_are_not_in_all_linear(architecture: str, apart: str) -> None:
    model = make_model(architecture)
    others = {*peft_choice(architecture, "all-linear")} - {*match_target_modules(model, "all-linear")}
    assert others and all(apart in name for name in others)


def test_a_default_expression_stays_an_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    table = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    monkeypatch.setitem(table, "persimmon", r".*layers\.1.*\.dense")
    model = make_model("persimmon")
    assert match_target_modules(model, default_target_modules(model)) == ["model.layers.1.self_attn.dense"]


@pytest.mark.parametrize("word", ["all-linear", r".*layers\.0.*\.(gate|up)_proj", "q_proj"])
def test_a_single_word_of_a_command_line_means_the_same(word: str) -> None:
    model = make_model("llama")
    assert match_target_modules(model, [word]) == peft_choice("llama", [word] if word == "q_proj" else word)


def test_unusable_target_modules_are_refused_by_name() -> None:
    model = make_model("llama")
    # If no layer matches, the message names the existing ones.
    for name, containing in (("query", "q_proj"), ("lm_head", "lm_head"), ("mlp", "mlp")):
        with raises(ConfigError, "target-modules-unusable", containing=containing):
            match_target_modules(model, [name])


def test_conv1d_becomes_the_same_linear_layer() -> None:
    conv = Conv1D(6, 4)
    nn.init.normal_(conv.bias)
    model = nn.Sequential(conv)
    x = torch.randn(2, 3, 4)
    expected = conv(x)
    assert convert_conv1d(model) == 1
    assert isinstance(model[0], nn.Linear)
    torch.testing.assert_close(model[0](x), expected)


def test_lora_a_depends_only_on_the_seed() -> None:
    model = make_model("llama")
    names = match_target_modules(model, ["q_proj", "down_proj"])
    first, again, other = (initial_lora_a(model, names, 4, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in names)
    assert not any(torch.equal(first[name], other[name]) for name in names)
    bound = 64**-0.5  # kaiming_uniform with a = sqrt(5) on 64 inputs
    q_proj = first["model.layers.0.self_attn.q_proj"]
    assert q_proj.shape == (4, 64)
    assert bound * 0.9 < float(q_proj.abs().max()) <= bound


def train(adapter: Path) -> None:
    """Give an adapter folder values in lora_B."""
    weights = load_file(adapter / "adapter_model.safetensors")
    for name, tensor in weights.items():
        if "lora_B" in name:
            tensor.normal_()
    save_file(weights, adapter / "adapter_model.safetensors", metadata={"format": "pt"})


def test_export_starts_from_an_adapter(tmp_path: Path) -> None:
    write_adapter(
        tmp_path / "adapter", start("llama", rank=3, lora_alpha=7.5, target_modules=["k_proj", "up_proj"])
    )
    train(tmp_path / "adapter")
    begun = start("llama", start_adapter=tmp_path / "adapter")
    assert (begun.rank, begun.alpha, begun.target_modules) == (3, 7.5, ["k_proj", "up_proj"])
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name in begun.lora_a:
        assert torch.equal(begun.lora_a[name], weights[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(begun.lora_b[name], weights[f"base_model.model.{name}.lora_B.weight"])


def test_adapter_of_a_model_with_a_head_fits_the_encoder(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", start("bert"))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = {
        name.replace("model.encoder", "model.bert.encoder"): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path)
    begun = start("bert", start_adapter=tmp_path / "adapter")
    assert next(iter(begun.lora_a)) == "encoder.layer.0.attention.self.query"


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", start("gpt2"))
    with raises(AdapterError, "adapter-does-not-fit", containing="transformer.h.0"):
        start("llama", start_adapter=tmp_path / "adapter")
