"""Quantization of a transformers model as one module, for a program for ExecuTorch's LLM runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from server_export.checkpoint.loading import prepare_model
from server_export.publishing.llm import LlmSpec, build_llm
from server_export.publishing.module_quantization import Int8Embedding, quantize
from server_export.quantize import quantization
from server_export.quantize.quantization import QuantizationReport
from tests.tiny_models import LENGTH, SHALLOW, make_model

torch.set_num_threads(1)


def quantized(architecture: str, scheme: str, **changes: Any) -> tuple[Any, QuantizationReport]:
    """Return a quantized tiny model, and the report of its quantization."""
    model = make_model(architecture, **{**SHALLOW[architecture], **changes})
    prepare_model(model, architecture, True)
    return model, quantize(model, scheme)


def test_layers_that_groups_do_not_divide_fall_back_and_are_listed() -> None:
    model, report = quantized("llama", "8da4w", intermediate_size=80)
    assert report.per_channel == ("model.layers.0.mlp.down_proj", "lm_head")
    assert report.to_json()["group_size"] == 32
    layers = model.model.layers[0].mlp
    assert layers.down_proj.weight.block_size == (1, 80)
    assert layers.up_proj.weight.block_size == (1, 32)


def test_vocabulary_head_is_int8_next_to_int4_layers() -> None:
    model, report = quantized("llama", "8da4w")
    assert report.per_channel == ("lm_head",)
    assert model.lm_head.weight.target_dtype == torch.int8
    assert model.lm_head.weight.block_size == (1, model.lm_head.in_features)


def test_tied_head_is_quantized_and_the_embedding_is_not() -> None:
    model, report = quantized("llama", "8da8w")
    assert type(model.lm_head.weight).__name__ == "IntxUnpackedToInt8Tensor"
    assert type(model.get_input_embeddings().weight) is nn.Parameter
    assert report.embedding == "fp32"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])  # Gemma's embedding scales its outputs
def test_large_embedding_becomes_int8_rows(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "EMBEDDING_BYTES", 0)
    vectors = make_model(architecture, **SHALLOW[architecture]).get_input_embeddings()(torch.arange(128))
    model, report = quantized(architecture, "8da8w")
    table = model.get_input_embeddings()
    assert isinstance(table, Int8Embedding)
    assert report.embedding == "int8"
    step = vectors.abs().amax(1, keepdim=True) / 127
    assert bool(((table(torch.arange(128)) - vectors).abs() <= step * 0.501).all())


@pytest.mark.parametrize("scheme", ["8da8w", "8da4w"])
def test_outputs_of_the_engine_are_close_to_the_float_model(tmp_path: Path, scheme: str) -> None:
    loaded = prepare_model(make_model("llama", **SHALLOW["llama"]), "llama", True)
    checks = build_llm(tmp_path, loaded, LlmSpec(LENGTH, scheme, None, ())).checks
    assert checks["float_difference"] < (0.1 if scheme == "8da8w" else 0.5)
    assert checks["quantized_difference"] < 1e-3
