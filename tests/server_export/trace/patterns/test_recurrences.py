"""What of a model's code is replaced while it is traced, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, MiniMaxConfig

from server_export.ir.recurrences import scan
from server_export.trace.model_graph import TracedModel
from server_export.trace.patterns import check_model, functions_of, patterns, tracing, weighted_mean
from server_export.trace.tables import ModelTables
from tests.refusals import refusal
from tests.tiny_models import RECURRENT, make_config

CONVOLUTION = "causal_conv1d_fn"
# By architecture, the functions of transformers' files, or methods of its layers, that its layers call.
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
def test_the_functions_have_the_names_and_parameters_of_transformers_own(architecture: str) -> None:
    model = outlined(make_config(architecture))
    own = functions_of(model)
    assert {name for _, name, _ in own} == CALLED[architecture]
    replacing = {name: each for pattern in patterns() for name, each in pattern.functions.items()}
    for _, name, function in own:
        ours = inspect.signature(replacing[name]).parameters.values()
        named = {each.name for each in ours if each.kind is not inspect.Parameter.VAR_KEYWORD}
        assert named - {"tables", "z"} <= set(inspect.signature(function).parameters)
    with tracing(TracedModel(model, ModelTables(8), True), lambda *_: None, None):
        assert all(vars(place)[name] is not function for place, name, function in own)
    assert all(vars(place)[name] is function for place, name, function in own)


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
def test_a_recurrence_of_another_kind_is_refused(config: Any) -> None:
    with refusal("unknown-recurrence"):
        check_model(outlined(config), 8)


def test_a_mean_of_values_so_far_is_transformers_own() -> None:
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    decay, first = torch.randn(4), torch.randn(4)
    key, value = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    expected, _ = rwkv_linear_attention_cpu(decay, first, key, value)

    def scanned(tables: ModelTables, factor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return scan(factor, source, [], source, source)

    with mock.patch.object(weighted_mean, "scan", scanned):
        found, _ = weighted_mean.weighted_mean(ModelTables(6), decay, first, key, value)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
