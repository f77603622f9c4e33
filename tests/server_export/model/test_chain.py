"""Constants of a model as a chain of blocks; tests/device_runner/engines compare what chains compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from prge.errors import ConfigError, Refusal
from server_export.adapter.layers import (
    convert_conv1d,
    default_target_modules,
    match_target_modules,
    read_by_rows,
)
from server_export.adapter.start import start_adapter
from server_export.check.model import compare_with_model
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import outline_model
from server_export.export import export
from server_export.model.chain import ModelChain
from server_export.pipeline import build_chain
from server_export.quantize.quantization import int8_rows
from server_export.settings import ExportConfig
from server_export.trace.patterns import unread_modules
from server_export.trace.tables import ModelTable
from tests.refusals import raises, refusal
from tests.tiers import rest
from tests.tiny_models import make_tokenizer, save_model
from tests.tiny_types import make_tiny

RANK, LONGEST = 4, 64


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", request.param)


def chain_of(folder: Path, **settings: Any) -> ModelChain:
    outline = outline_model(str(folder))
    with torch.device("meta"):
        convert_conv1d(twin := outline_model(str(folder)).model)
    names = match_target_modules(twin, default_target_modules(twin))
    generator = torch.Generator().manual_seed(0)
    lora_a = {
        name: torch.randn(RANK, twin.get_submodule(name).in_features, generator=generator) * 0.1
        for name in names
    }
    return build_chain(outline, find_files(str(folder)), lora_a, longest=LONGEST, **settings)


@pytest.mark.parametrize("folder", ["bert", "gpt2"], indirect=True)
def test_layers_have_no_bias_of_their_own(folder: Path) -> None:
    chain = chain_of(folder, scheme="8da8w")
    graphs = [kind.block.graph_module.graph for kind in chain.kinds.values()]
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
        graph_module = chain.kinds[chain.kind_of[number]].block.graph_module
        read = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
        assert set(tensors) == {name for name in read if not name.startswith("constant_")}
    assert max(int(tensor.max()) for name, tensor in head.items() if name.endswith("_codes")) > 100


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_large_table_becomes_codes_some_rows_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server_export.quantize.frozen.EMBEDDING_BYTES", 0)
    chain = chain_of(folder, scheme="8da8w")
    codes, scales = int8_rows(chain.weights.read("model.embed_tokens.weight"))
    monkeypatch.setattr(chain.weights, "read", refuse_whole(chain.weights.read))
    found = chain.tensors(0)
    assert torch.equal(found["model_model_embed_tokens_weight_codes"], codes)
    assert torch.equal(found["model_model_embed_tokens_weight_scale"], scales)


def refuse_whole(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def rows_alone(name: str, rows: range | None = None) -> torch.Tensor:
        assert rows is not None
        return read(name, rows)

    return rows_alone


@pytest.mark.parametrize("folder", ["llama4"], indirect=True)
def test_what_turns_complex_numbers_is_not_quantized(folder: Path) -> None:
    """Queries and keys would be rounded before they are turned."""
    kinds = chain_of(folder, scheme="8da4w").kinds.values()
    assert any(name.startswith("constant_") for kind in kinds for name in kind.frozen.stored)
    assert not any(name.startswith("constant_") for kind in kinds for name in kind.frozen.layers)


@pytest.mark.parametrize("folder", ["deberta-v2", *rest("mpnet", "modernbert", "albert")], indirect=True)
def test_encoders_that_know_how_far_tokens_are_apart(folder: Path) -> None:
    """Rows are longer than windows and buckets; layers that read tables of distances aren't adapted."""
    names = [
        name for name, _ in outline_model(str(folder)).model.named_modules() if name.endswith("query_proj")
    ]
    assert not read_by_rows(outline_model(str(folder)).model, names)
    start = start_of(folder, "value_proj") if names else start_of(folder)
    chain = build_chain(outline_model(str(folder)), find_files(str(folder)), start, longest=LONGEST)
    assert compare_with_model(chain, str(folder), None).difference < 1e-5


_WAYS = {
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


@pytest.mark.parametrize("model_type", ["convbert", *rest(*(name for name in _WAYS if name != "convbert"))])
def test_encoders_with_ways_of_their_own(model_type: str, tmp_path: Path) -> None:
    make_tiny(model_type).save_pretrained(tmp_path)
    chain = build_chain(
        outline_model(str(tmp_path)), find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST
    )
    assert compare_with_model(chain, str(tmp_path), None).difference < 1e-5


def test_the_encoder_of_a_pair(tmp_path: Path) -> None:
    """T5's, of a checkpoint that has the decoder too, once its configuration asks for the encoder alone."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with raises(Refusal, "encoder-decoder", saying="T5EncoderModel"):
        outline_model(str(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["T5EncoderModel"]}))
    chain = build_chain(
        outline_model(str(tmp_path)), find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST
    )
    assert compare_with_model(chain, str(tmp_path), None).difference < 1e-5


def test_a_decoder_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    model = make_tiny("bert-generation")
    model.config.is_decoder = False
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    chain = build_chain(
        outline_model(str(tmp_path)), find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST
    )
    with refusal("not-causal"):
        compare_with_model(chain, str(tmp_path), None)


@pytest.mark.parametrize("model_type", ["cpmant", "xlnet"])
def test_what_sees_later_tokens_and_cant_be_traced_is_refused_for_the_former(
    model_type: str, tmp_path: Path
) -> None:
    """They are among transformers' causal language models, but let all tokens see all."""
    make_tiny(model_type).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    with refusal("not-causal"):
        export(ExportConfig(str(tmp_path / "model"), tmp_path / "bundle", sequence_length=24))


def test_an_encoder_that_reads_padding_is_refused(tmp_path: Path) -> None:
    """What is added for padding is read as a share of it, and is more than the model expects."""
    make_tiny("yoso").save_pretrained(tmp_path)
    chain = build_chain(
        outline_model(str(tmp_path)), find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST
    )
    with refusal("reads-padding"):
        compare_with_model(chain, str(tmp_path), None)


def test_layers_that_are_never_asked_are_not_adapted(tmp_path: Path) -> None:
    """Those that read an encoder, of a decoder without one."""
    make_tiny("blenderbot").save_pretrained(tmp_path)
    model = outline_model(str(tmp_path)).model
    names = match_target_modules(model, ["q_proj"])
    assert [name for name in names if "encoder_attn" in name]
    assert read_by_rows(model, names) == [name for name in names if "self_attn" in name]


@pytest.mark.parametrize(
    ("kind", "refused", "place", "others"),
    [
        # PEFT gives what is on a layer of that name to experts, as older checkpoints had them.
        ("glm4_moe", "up_proj", 3, {"self_attn"}),
        ("mamba2", "out_proj", 4, {"in_proj"}),
    ],
)
def test_layers_whose_adapter_peft_does_not_load_are_not_adapted(
    kind: str, refused: str, place: int, others: set[str], tmp_path: Path
) -> None:
    make_tiny(kind).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    outline = outline_model(str(tmp_path))

    def adapted(*targets: str) -> set[str]:
        config = ExportConfig(str(tmp_path), tmp_path / "bundle", target_modules=[*targets])
        return {name.split(".")[place] for name in start_adapter(config, outline, False).lora_a}

    assert adapted() == adapted("all-linear") == others
    with raises(ConfigError, "target-modules-refused-by-peft", saying=kind) as caught:
        adapted(refused)
    assert refused in str(caught.value)


def start_of(folder: Path, targets: str | None = None) -> dict[str, torch.Tensor]:
    """Random `lora_a` by layer."""
    twin = outline_model(str(folder)).model
    names = match_target_modules(twin, [targets] if targets else default_target_modules(twin))
    return {name: torch.randn(RANK, twin.get_submodule(name).in_features) for name in names}


def test_layers_that_change_no_answer_are_refused(tmp_path: Path) -> None:
    """Without a kernel for another device transformers' MRA attends to nothing."""
    make_tiny("mra").save_pretrained(tmp_path)
    outline, start = outline_model(str(tmp_path)), start_of(tmp_path)
    with refusal("adapter-without-effect"):
        build_chain(outline, find_files(str(tmp_path)), start, longest=LONGEST)


def test_complex_numbers_are_refused(tmp_path: Path) -> None:
    make_tiny("fnet").save_pretrained(tmp_path)
    outline = outline_model(str(tmp_path))
    with refusal("complex-numbers") as caught:
        build_chain(outline, find_files(str(tmp_path)), {}, longest=LONGEST)
    assert caught.value.operator == "aten.fft_fftn.default"


def test_texts_of_more_tokens_than_an_indexer_chooses_are_refused(tmp_path: Path) -> None:
    make_tiny("deepseek_v32").save_pretrained(tmp_path)
    outline = outline_model(str(tmp_path))
    with raises(Refusal, "indexer-budget", saying="--context 64"):
        build_chain(outline, find_files(str(tmp_path)), {}, longest=65)
    linear = match_target_modules(outline.model, "all-linear", unread_modules(outline.model))
    assert linear and not any("indexer" in name for name in linear)


def test_a_mask_of_the_longest_row_is_never_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 256 MB for rows of 8,192 tokens, and each layer would have one."""
    made, of = list[str](), ModelTable.of

    def watched(table: ModelTable, length: int) -> torch.Tensor:
        made.append(table.kind)
        return of(table, length)

    monkeypatch.setattr(ModelTable, "of", watched)
    save_model(tmp_path, "llama")
    build_chain(outline_model(str(tmp_path)), find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST)
    assert "causal" not in made


def test_texts_longer_than_a_chunk_of_attention_are_refused(tmp_path: Path) -> None:
    make_tiny("llama4_text").save_pretrained(tmp_path)
    outline = outline_model(str(tmp_path))
    outline.config.attention_chunk_size = 32
    with raises(Refusal, "attention-chunk", saying="64") as caught:
        build_chain(outline, find_files(str(tmp_path)), start_of(tmp_path), longest=LONGEST)
    assert caught.value.remedy == "export it with --context 32"
