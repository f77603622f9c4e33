"""What of a model's code is replaced while it is traced, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, MiniMaxConfig

from prge.errors import BundleError
from server_export.ir.recurrences import CONVOLUTION as CONVOLVED
from server_export.ir.recurrences import scan
from server_export.trace.recurrent import (
    RECURRENCES,
    REPLACED,
    _Operators,
    functions_of,
    traced_recurrences,
    write_convolutions,
)
from server_export.trace.tables import ModelTables
from tests.server_export.derive.tangent.graphs import Function
from tests.tiny_models import RECURRENT, make_config

CONVOLUTION = "causal_conv1d_fn"
DELTA_RULE, STATE_SPACE, SELECTIVE_SCAN, GATED_SCAN, OWN_DECAYS, WEIGHTED_MEAN = RECURRENCES
# By architecture, the functions of transformers' files, or methods of its layers, that its layers call.
CALLED = {
    "lfm2": {CONVOLUTION},
    "qwen3_5": {CONVOLUTION, DELTA_RULE},
    "mamba": {CONVOLUTION, SELECTIVE_SCAN},
    "recurrent_gemma": {GATED_SCAN},
    "kimi_linear": {CONVOLUTION, OWN_DECAYS},
    **{name: {CONVOLUTION, STATE_SPACE} for name in ("mamba2", "falcon_h1", "granite_hybrid")},
}


def outlined(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_the_functions_have_the_names_and_parameters_of_transformers_own(architecture: str) -> None:
    model = outlined(make_config(architecture))
    own = functions_of(model)
    assert {name for _, name, _ in own} == CALLED[architecture]
    operators = _Operators(ModelTables(8))
    for _, name, function in own:
        ours = inspect.signature(getattr(operators, REPLACED[name])).parameters.values()
        named = {each.name for each in ours if each.kind is not inspect.Parameter.VAR_KEYWORD}
        assert named - {"z"} <= set(inspect.signature(function).parameters)
    with traced_recurrences(model, ModelTables(8)):
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
    with (
        pytest.raises(BundleError, match="has a recurrence of a kind that isn't known here"),
        traced_recurrences(outlined(config), ModelTables(8)),
    ):
        pass


@pytest.mark.parametrize(
    ("padding", "groups", "cut", "is_found"),
    [(2, 4, slice(None, 6), True), (2, 1, slice(None, 6), False), (2, 4, slice(2, None), False)],
    ids=["the tokens before", "numbers of others", "the tokens behind"],
)
def test_a_convolution_of_the_tokens_before_has_a_memory(
    padding: int, groups: int, cut: slice, is_found: bool
) -> None:
    layer = torch.nn.Conv1d(4, 4, 3, padding=padding, groups=groups).requires_grad_(False)
    state = torch.randn(2, 4, 6)
    graph_module = torch.export.export(Function(lambda x: layer(x)[..., cut]), (state,), strict=False).module(
        check_guards=False
    )
    tables = ModelTables(8)
    write_convolutions(graph_module, tables)
    assert any(node.target is CONVOLVED for node in graph_module.graph.nodes) is is_found
    assert [table.kind for table in tables.all] == is_found * [
        "behind",
        "entering",
        "entering",
        "leaving",
        "staying",
    ]


@pytest.mark.parametrize(
    ("pads", "is_found"), [((0, 0, 1, -1), True), ((0, 0, -1, 1), False), ((0, 0, 1, 0), False)], ids=str
)
def test_tokens_that_are_moved_back_have_a_memory(pads: tuple[int, ...], is_found: bool) -> None:
    state = torch.randn(2, 6, 4)
    moved = Function(lambda x: torch.nn.functional.pad(x, pads))
    graph_module = torch.export.export(moved, (state,), strict=False).module(check_guards=False)
    tables = ModelTables(8)
    write_convolutions(graph_module, tables)
    found = [node for node in graph_module.graph.nodes if node.target is CONVOLVED]
    assert len(found) == is_found
    assert [table.kind for table in tables.all] == is_found * ["behind", "entering", "leaving", "staying"]


def test_a_mean_of_values_so_far_is_transformers_own() -> None:
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    decay, first = torch.randn(4), torch.randn(4)
    key, value = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    expected, _ = rwkv_linear_attention_cpu(decay, first, key, value)
    scans = _Operators(ModelTables(6))
    with mock.patch.object(scans, "_scan", lambda factor, source: scan(factor, source, [], source, source)):
        found, _ = scans.weighted_mean(decay, first, key, value)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
