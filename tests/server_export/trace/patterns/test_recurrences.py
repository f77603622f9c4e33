"""Functions of a model that are replaced while it is traced, and recurrences that are refused."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, MiniMaxConfig

from server_export.ir.recurrences import scan
from server_export.trace.model_graph import TracedModel
from server_export.trace.patterns import check_model, patterns, replaceable_functions, tracing, weighted_mean
from server_export.trace.tables import ModelTables
from tests.refusals import refusal
from tests.tiny_models import RECURRENT, make_config

CONVOLUTION = "causal_conv1d_fn"
# By architecture, the functions of transformers' modules, or methods of its layers, that the layers call.
CALLED = {
    "lfm2": {CONVOLUTION},
    "qwen3_5": {CONVOLUTION, "torch_chunk_gated_delta_rule"},
    "mamba": {CONVOLUTION, "mamba_selective_scan"},
    "recurrent_gemma": {"_rnn_scan"},
    "kimi_linear": {CONVOLUTION, "chunk_kimi_delta_attention"},
    **{name: {CONVOLUTION, "mamba2_chunk_scan"} for name in ("mamba2", "falcon_h1", "granite_hybrid")},
}


def outlined(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_replacements_have_names_and_parameters_of_transformers(architecture: str) -> None:
    model = outlined(make_config(architecture))
    originals = replaceable_functions(model)
    assert {name for _, name, _ in originals} == CALLED[architecture]
    replacements = {name: each for pattern in patterns() for name, each in pattern.functions.items()}
    for _, name, function in originals:
        parameters = inspect.signature(replacements[name]).parameters.values()
        named = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
        assert named - {"tables", "z"} <= set(inspect.signature(function).parameters)
    with tracing(TracedModel(model, ModelTables(8), True), lambda *_: None, None):
        assert all(vars(owner)[name] is not function for owner, name, function in originals)
    assert all(vars(owner)[name] is function for owner, name, function in originals)


@pytest.mark.parametrize(
    "config",
    [
        MiniMaxConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=2,
            layer_types=["linear_attention"],
        ),
    ],
    ids=["minimax"],
)
def test_an_unknown_recurrence_is_refused(config: Any) -> None:
    with refusal("unknown-recurrence"):
        check_model(outlined(config), 8)


def test_the_weighted_mean_equals_transformers() -> None:
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    decay, first = torch.randn(4), torch.randn(4)
    key, value = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    expected, _ = rwkv_linear_attention_cpu(decay, first, key, value)

    def scanned(tables: ModelTables, factor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return scan(factor, source, [], source, source)

    with mock.patch.object(weighted_mean, "scan", scanned):
        actual, _ = weighted_mean.weighted_mean(ModelTables(6), decay, first, key, value)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
