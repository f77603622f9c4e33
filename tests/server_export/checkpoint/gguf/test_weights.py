"""Weights of GGUF files equal those of the written model, and those that transformers dequantizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from server_export.adapter.layers import conv1d_names
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import load_meta_model, load_model
from server_export.checkpoint.weights import CheckpointWeights
from tests.gguf_files import write_gguf
from tests.tiny_models import make_model, make_tokenizer

# Changes that make tiny models representable in a header.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "phi3": {},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
    "lfm2": {},
    "qwen3_moe": {},
    "qwen2_moe": {},
}


def weights_of(path: Path) -> tuple[CheckpointWeights, Any]:
    outline = load_meta_model(str(path)).model
    transposed = {f"{name}.weight" for name in conv1d_names(outline)}
    return CheckpointWeights(find_files(str(path)), outline, transposed), outline


@pytest.mark.parametrize("architecture", MODELS)
def test_a_file_contains_the_written_model(architecture: str, tmp_path: Path) -> None:
    """The weights are equal, and so are the logits, which depend on the configuration too."""
    model = make_model(architecture, **MODELS[architecture])
    path = write_gguf(tmp_path / "tiny.gguf", model, make_tokenizer())
    weights, outline = weights_of(path)
    assert type(outline) is type(model)
    # llama.cpp stores Gemma's norms as 1 + weight.
    tolerance = 1e-6 if architecture.startswith("gemma") else 0.0
    transposed = {f"{name}.weight" for name in conv1d_names(model)}
    for name, parameter in model.named_parameters():
        weight = weights.read(name)
        expected = parameter.t() if name in transposed else parameter
        assert torch.allclose(weight, expected, rtol=0, atol=tolerance), name
    tokens = torch.randint(4, 100, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        answers = load_model(str(path)).model(tokens).logits
        assert torch.allclose(answers, model(tokens).logits, atol=1e-5)


# Types that the package gguf can write, and types whose blocks this test makes up.
TYPES = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
BLOCKS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}


@pytest.mark.parametrize("ggml_type", [*TYPES, *BLOCKS])
def test_weights_are_those_that_transformers_dequantizes(ggml_type: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model("llama", **(_WIDE if ggml_type in BLOCKS else {}))
    path = write_gguf(tmp_path / "tiny.gguf", model, make_tokenizer(), ggml_type)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    weights, _ = weights_of(path)
    for name, parameter in expected.named_parameters():
        weight = weights.read(name)
        assert torch.equal(weight, parameter), name
        if ggml_type not in BLOCKS:
            assert torch.allclose(weight, model.get_parameter(name), atol=0.1), name
    for name, parameter in load_model(str(path)).model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name


def test_rows_are_read_alone_if_they_are_stored_unpermuted(tmp_path: Path, monkeypatch: Any) -> None:
    """Rows of a table are read in parts; a permuted weight is read as a whole."""
    from server_export.checkpoint.gguf.header import GgufTensor

    model = make_model("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model, make_tokenizer(), "Q8_0")
    weights, _ = weights_of(path)
    table, query = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"
    whole, permuted = weights.read(table), weights.read(query)
    read, slices = GgufTensor.values, list[Any]()

    def read_and_record(tensor: GgufTensor, rows: Any = None) -> np.ndarray:
        slices.append(rows)
        return read(tensor, rows)

    monkeypatch.setattr(GgufTensor, "values", read_and_record)
    assert torch.equal(torch.cat([*weights.iter_rows(table, 50)]), whole)
    assert slices == [slice(0, 50, 1), slice(50, 100, 1), slice(100, 128, 1)]
    assert torch.equal(weights.read(table, [3, 99, 7]), whole[[3, 99, 7]])
    assert torch.equal(weights.read(query, [3, 60, 7]), permuted[[3, 60, 7]])
    assert torch.equal(torch.cat([*weights.iter_rows(query, 50)]), permuted)


def test_experts_are_read_one_by_one(tmp_path: Path, monkeypatch: Any) -> None:
    from server_export.checkpoint.gguf.header import GgufTensor

    path = write_gguf(tmp_path / "tiny.gguf", make_model("qwen3_moe"), make_tokenizer())
    weights, _ = weights_of(path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = weights.read(name)
    read, sizes = GgufTensor.values, list[int]()

    def read_and_record(tensor: GgufTensor, rows: Any = None) -> np.ndarray:
        sizes.append(len(result := read(tensor, rows)))
        return result

    monkeypatch.setattr(GgufTensor, "values", read_and_record)
    assert torch.equal(weights.read(name, [5, 2]), whole[[5, 2]])
    assert sizes == [2, 2]


def test_transformers_tables_exist() -> None:
    """transformers' tables have no public interface; this test fails first if the tables change."""
    from transformers.integrations import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import (
        GGUF_CONFIG_ARCHS,
        convert_gguf_tokenizer,
        get_gguf_config,
        get_gguf_conversion_mapping,
        get_gguf_tokenizer,
        is_gguf_arch_supported,
        read_gguf_metadata,
    )
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        load_gguf_checkpoint,
    )

    called = (convert_gguf_tokenizer, get_gguf_config, get_gguf_conversion_mapping, get_gguf_tokenizer)
    called += (is_gguf_arch_supported, read_gguf_metadata, get_gguf_hf_weights_map, load_gguf_checkpoint)
    assert all(map(callable, called))
    assert GGUF_CONFIG_MAPPING["llama"]["attention.head_count"] == "num_attention_heads"
    assert "lfm2" in GGUF_CONFIG_ARCHS
    assert "llama3" in GGUF_PRE_TOKENIZER_SPLITS
    assert issubclass(TENSOR_PROCESSORS["llama"], TensorProcessor)
