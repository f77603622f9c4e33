"""Tensors of a chain of blocks, and refused models; tests/device_runner/engines compare computed values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from prge.errors import ConfigError, Refusal
from server_export.adapter.initial_adapter import start_adapter
from server_export.adapter.layers import (
    convert_conv1d,
    default_target_modules,
    match_target_modules,
    per_token_layers,
)
from server_export.check.model import compare_with_model
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import load_meta_model
from server_export.export import export
from server_export.model.chain import ModelChain
from server_export.pipeline import build_chain
from server_export.quantize.quantization import int8_rows
from server_export.settings import ExportConfig
from server_export.trace.patterns import unadapted_modules
from server_export.trace.tables import ModelTable
from tests.refusals import raises, refusal
from tests.tiers import second_tier
from tests.tiny_models import make_tokenizer, save_model
from tests.tiny_types import make_tiny

RANK, LONGEST = 4, 64


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", request.param)


def chain_of(folder: Path, **settings: Any) -> ModelChain:
    outline = load_meta_model(str(folder))
    with torch.device("meta"):
        convert_conv1d(meta_model := load_meta_model(str(folder)).model)
    names = match_target_modules(meta_model, default_target_modules(meta_model))
    generator = torch.Generator().manual_seed(0)
    lora_a = {
        name: torch.randn(RANK, meta_model.get_submodule(name).in_features, generator=generator) * 0.1
        for name in names
    }
    return build_chain(outline, find_files(str(folder)), lora_a, longest=LONGEST, **settings)


@pytest.mark.parametrize("folder", ["bert", "gpt2"], indirect=True)
def test_biases_of_layers_are_separate_additions(folder: Path) -> None:
    chain = chain_of(folder, scheme="8da8w")
    graphs = [block_type.block.graph_module.graph for block_type in chain.block_types.values()]
    linear = torch.ops.aten.linear.default
    layers = [node for graph in graphs for node in graph.find_nodes(op="call_function", target=linear)]
    assert layers and all(len(layer.args) == 2 for layer in layers)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_quantized_layers_are_codes_and_scales(folder: Path) -> None:
    chain = chain_of(folder, scheme="8da4w")
    block, head = chain.tensors(1), chain.tensors(len(chain.blocks) - 1)
    codes = {name: tensor for name, tensor in block.items() if tensor.dtype == torch.int8}
    layers = [tensor for name, tensor in codes.items() if name.endswith("_codes")]
    assert len(layers) == 7
    assert all(int(tensor.min()) >= -8 and int(tensor.max()) <= 7 for tensor in layers)
    assert not any("lora_a_codes" in name for name in block)
    for number, tensors in ((1, block), (len(chain.blocks) - 1, head)):
        graph_module = chain.block_types[chain.type_of[number]].block.graph_module
        read = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
        assert set(tensors) == {name for name in read if not name.startswith("constant_")}
    assert max(int(tensor.max()) for name, tensor in head.items() if name.endswith("_codes")) > 100


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_large_table_is_quantized_in_parts_of_its_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server_export.quantize.frozen.EMBEDDING_BYTES", 0)
    chain = chain_of(folder, scheme="8da8w")
    codes, scales = int8_rows(chain.weights.read("model.embed_tokens.weight"))
    monkeypatch.setattr(chain.weights, "read", refuse_whole(chain.weights.read))
    tensors = chain.tensors(0)
    assert torch.equal(tensors["model_model_embed_tokens_weight_codes"], codes)
    assert torch.equal(tensors["model_model_embed_tokens_weight_scale"], scales)


def refuse_whole(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def rows_alone(name: str, rows: range | None = None) -> torch.Tensor:
        assert rows is not None
        return read(name, rows)

    return rows_alone


@pytest.mark.parametrize("folder", ["llama4"], indirect=True)
def test_rotations_are_not_quantized(folder: Path) -> None:
    """Otherwise queries and keys would be rounded before their rotation."""
    block_types = chain_of(folder, scheme="8da4w").block_types.values()
    assert any(
        name.startswith("constant_") for block_type in block_types for name in block_type.frozen.stored
    )
    assert not any(
        name.startswith("constant_") for block_type in block_types for name in block_type.frozen.layers
    )


@pytest.mark.parametrize(
    "folder", ["deberta-v2", *second_tier("mpnet", "modernbert", "albert")], indirect=True
)
def test_encoders_with_relative_positions_are_exported(folder: Path) -> None:
    """Rows are longer than windows and buckets. Layers that read tables of distances can't be adapted."""
    names = [
        name for name, _ in load_meta_model(str(folder)).model.named_modules() if name.endswith("query_proj")
    ]
    assert not per_token_layers(load_meta_model(str(folder)).model, names)
    start = start_of(folder, "value_proj") if names else start_of(folder)
    chain = build_chain(load_meta_model(str(folder)), find_files(str(folder)), start, longest=LONGEST)
    assert compare_with_model(chain, str(folder), None).difference < 1e-5


_UNUSUAL = {
    "clip_text_model": "it holds a row against its positions",
    "convbert": "it convolves tokens, and lays neighbours side by side",
    "layoutlm": "it calls its pooler",
    "mobilebert": "it moves rows by a token",
    "molmo2_text": "queries, keys and values are stored as one",
    "nystromformer": "it numbers positions from two, and convolves what each head reads",
    "neomme": "all layers read the embeddings",
    "tapas": "it has seven types of tokens",
    "xmod": "it has layers for one language of two",
    "xlm": "it makes masks of lengths, and keeps keys",
}


@pytest.mark.parametrize(
    "model_type", ["convbert", *second_tier(*(name for name in _UNUSUAL if name != "convbert"))]
)
def test_encoders_with_unusual_forwards_are_exported(model_type: str, tmp_path: Path) -> None:
    make_tiny(model_type).save_pretrained(tmp_path)
    chain = build_chain(
        load_meta_model(str(tmp_path)), find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST
    )
    assert compare_with_model(chain, str(tmp_path), None).difference < 1e-5


def test_the_encoder_of_an_encoder_decoder_model_is_exported(tmp_path: Path) -> None:
    """The encoder of a T5 checkpoint is exported if its configuration names only the encoder."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with raises(Refusal, "encoder-decoder", containing="T5EncoderModel"):
        load_meta_model(str(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["T5EncoderModel"]}))
    chain = build_chain(
        load_meta_model(str(tmp_path)), find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST
    )
    assert compare_with_model(chain, str(tmp_path), None).difference < 1e-5


def test_a_decoder_that_attends_to_later_tokens_is_refused(tmp_path: Path) -> None:
    model = make_tiny("bert-generation")
    model.config.is_decoder = False
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    chain = build_chain(
        load_meta_model(str(tmp_path)), find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST
    )
    with refusal("not-causal"):
        compare_with_model(chain, str(tmp_path), None)


@pytest.mark.parametrize("model_type", ["cpmant", "xlnet"])
def test_untraceable_models_that_attend_to_later_tokens_are_refused_as_such(
    model_type: str, tmp_path: Path
) -> None:
    """transformers lists these models as causal, but their tokens attend to all tokens."""
    make_tiny(model_type).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    with refusal("not-causal"):
        export(ExportConfig(str(tmp_path / "model"), tmp_path / "bundle", sequence_length=24))


def test_an_encoder_that_reads_padding_is_refused(tmp_path: Path) -> None:
    """The model uses the additive padding mask as a factor."""
    make_tiny("yoso").save_pretrained(tmp_path)
    chain = build_chain(
        load_meta_model(str(tmp_path)), find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST
    )
    with refusal("reads-padding"):
        compare_with_model(chain, str(tmp_path), None)


def test_layers_that_are_never_called_are_not_adapted(tmp_path: Path) -> None:
    """A decoder without an encoder never calls its cross-attention."""
    make_tiny("blenderbot").save_pretrained(tmp_path)
    model = load_meta_model(str(tmp_path)).model
    names = match_target_modules(model, ["q_proj"])
    assert [name for name in names if "encoder_attn" in name]
    assert per_token_layers(model, names) == [name for name in names if "self_attn" in name]


@pytest.mark.parametrize(
    ("model_type", "refused", "depth", "others"),
    [
        # PEFT loads an adapter of this name into experts, which older checkpoints had as single layers.
        ("glm4_moe", "up_proj", 3, {"self_attn"}),
        ("mamba2", "out_proj", 4, {"in_proj"}),
    ],
)
def test_layers_whose_adapter_peft_does_not_load_are_not_adapted(
    model_type: str, refused: str, depth: int, others: set[str], tmp_path: Path
) -> None:
    make_tiny(model_type).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    outline = load_meta_model(str(tmp_path))

    def adapted(*targets: str) -> set[str]:
        config = ExportConfig(str(tmp_path), tmp_path / "bundle", target_modules=[*targets])
        return {name.split(".")[depth] for name in start_adapter(config, outline, False).lora_a}

    assert adapted() == adapted("all-linear") == others
    with raises(ConfigError, "target-modules-refused-by-peft", containing=model_type) as caught:
        adapted(refused)
    assert refused in str(caught.value)


def start_of(folder: Path, targets: str | None = None) -> dict[str, torch.Tensor]:
    """Return random `lora_a` by layer."""
    meta_model = load_meta_model(str(folder)).model
    names = match_target_modules(meta_model, [targets] if targets else default_target_modules(meta_model))
    return {name: torch.randn(RANK, meta_model.get_submodule(name).in_features) for name in names}


def test_adapted_layers_without_effect_are_refused(tmp_path: Path) -> None:
    """transformers' MRA attends to nothing without its GPU kernel."""
    make_tiny("mra").save_pretrained(tmp_path)
    outline, start = load_meta_model(str(tmp_path)), start_of(tmp_path)
    with refusal("adapter-without-effect"):
        build_chain(outline, find_files(str(tmp_path)), start, longest=LONGEST)


def test_complex_numbers_are_refused(tmp_path: Path) -> None:
    make_tiny("fnet").save_pretrained(tmp_path)
    outline = load_meta_model(str(tmp_path))
    with refusal("complex-numbers") as caught:
        build_chain(outline, find_files(str(tmp_path)), {}, longest=LONGEST)
    assert caught.value.operator == "aten.fft_fftn.default"


def test_texts_with_more_tokens_than_an_indexer_selects_are_refused(tmp_path: Path) -> None:
    make_tiny("deepseek_v32").save_pretrained(tmp_path)
    outline = load_meta_model(str(tmp_path))
    with raises(Refusal, "indexer-budget", containing="--context 64"):
        build_chain(outline, find_files(str(tmp_path)), {}, longest=65)
    linear = match_target_modules(outline.model, "all-linear", unadapted_modules(outline.model))
    assert linear and not any("indexer" in name for name in linear)


def test_a_causal_mask_of_the_longest_row_is_never_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask would take 256 MB for rows of 8,192 tokens in each layer."""
    types, of = list[str](), ModelTable.of

    def watched(table: ModelTable, length: int) -> torch.Tensor:
        types.append(table.type)
        return of(table, length)

    monkeypatch.setattr(ModelTable, "of", watched)
    save_model(tmp_path, "llama")
    build_chain(
        load_meta_model(str(tmp_path)), find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST
    )
    assert "causal" not in types


def test_texts_longer_than_a_chunk_of_attention_are_refused(tmp_path: Path) -> None:
    make_tiny("llama4_text").save_pretrained(tmp_path)
    outline = load_meta_model(str(tmp_path))
    outline.config.attention_chunk_size = 32
    with raises(Refusal, "attention-chunk", containing="64") as caught:
        build_chain(outline, find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST)
    assert caught.value.remedy == "Export it with --context 32."
