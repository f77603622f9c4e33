"""Loading models: which models are accepted, and how others are refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, DbrxConfig

from server_export.checkpoint import loading
from server_export.checkpoint.loading import (
    load_meta_model,
    load_model,
    parameter_count,
    read_use_cache,
    vocabulary_size,
)
from tests.refusals import refusal
from tests.tiers import second_tier
from tests.tiny_models import ARCHITECTURES, DECODERS, make_config, make_model, save_model
from tests.tiny_types import make_classifier, make_tiny


@pytest.mark.parametrize(("architecture", "is_decoder"), [("llama", True), ("gpt2", True), ("bert", False)])
def test_the_architecture_decides_between_decoder_and_encoder(
    architecture: str, is_decoder: bool, tmp_path: Path
) -> None:
    loaded = load_model(str(save_model(tmp_path, architecture)))
    assert loaded.is_decoder is is_decoder
    assert not loaded.model.training
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}


def test_pooled_loads_without_the_head(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path, "llama")), pooled=True)
    assert type(loaded.model).__name__ == "LlamaModel"
    assert not loaded.is_decoder


def test_the_vocabulary_has_the_tokens_of_both_embedding_and_head() -> None:
    """Moshi's embedding has one token more than its head."""
    tokens, width = 128, 64
    model = make_model("llama")
    assert vocabulary_size(model) == tokens
    model.model.embed_tokens = torch.nn.Embedding(tokens + 1, width)
    assert vocabulary_size(model) == tokens
    model.model.embed_tokens = torch.nn.Embedding(tokens - 1, width // 2)
    assert vocabulary_size(model) == tokens - 1
    assert vocabulary_size(model.model) == tokens - 1


@pytest.mark.parametrize("model_type", ["git", *second_tier("phi4_multimodal")])
def test_the_image_encoder_of_a_language_model_is_left_out(model_type: str, tmp_path: Path) -> None:
    make_tiny(model_type).save_pretrained(tmp_path)
    loaded, outline = load_model(str(tmp_path)), load_meta_model(str(tmp_path))
    assert parameter_count(loaded.model) == parameter_count(outline.model)
    parts = {name.split(".")[1] for name, _ in outline.model.named_parameters()}
    assert not any("encoder" in part and "image" in part for part in parts)


def test_half_precision_checkpoint_is_loaded_as_float32(tmp_path: Path) -> None:
    make_model("llama").half().save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"model_type": "t5", "d_model": 8}, "encoder-decoder"),
        ({"model_type": "vit"}, "not-a-text-model"),
        ({"model_type": "no-such-type"}, "not-a-transformers-model"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantized-already",
        ),
        ({"model_type": "prophetnet", "is_encoder_decoder": False}, "several-streams"),
        ({"model_type": "llama", "hidden_act": "no such thing"}, "model-not-made"),
    ],
)
def test_unsupported_models_are_refused_with_a_code(
    config: dict[str, object], code: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refusal(code):
        load_model(str(tmp_path))


def change_weights(folder: Path, remove: str = "", **tensors: Any) -> str:
    """Remove the last weight whose name ends with `remove`, add others, and return the removed name."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    removed = max((name for name in weights if remove and name.endswith(remove)), default="")
    remaining = {name: tensor for name, tensor in weights.items() if name != removed}
    save_file({**remaining, **tensors}, path, metadata={"format": "pt"})
    return removed


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_missing_and_unused_weights_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, architecture)
    # The added tensor has the same size, so only names differ.
    removed = change_weights(
        folder, ".bias" if architecture in ("opt", "gpt2", "bert", "roberta") else "norm.weight"
    )
    change_weights(folder, spare=torch.zeros(4096))
    with refusal("weights-incomplete") as caught:
        load_model(str(folder))
    message = str(caught.value)
    assert "it lacks" in message and removed and removed.split(".", 1)[1] in message
    assert "it does not use" in message and "spare" in message


@pytest.mark.parametrize("has_experts", [False, True])
def test_unsupported_experts_are_refused(
    has_experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration may count experts that no layer has."""
    monkeypatch.setattr(loading, "expert_layers", lambda model: {})
    sparse = {} if has_experts else {"mlp_only_layers": [0]}
    config = make_config("qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **sparse)
    config.save_pretrained(tmp_path)
    with refusal("experts-not-supported") if has_experts else contextlib.nullcontext():
        load_meta_model(str(tmp_path))


def test_experts_counted_in_an_inner_configuration_are_refused(tmp_path: Path) -> None:
    config = DbrxConfig(
        d_model=64,
        n_heads=4,
        n_layers=1,
        vocab_size=128,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "hidden_size": 64},
        architectures=["DbrxForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    with refusal("experts-not-supported"):
        load_meta_model(str(tmp_path))


@pytest.mark.parametrize("architecture", sorted(DECODERS))
def test_a_decoder_loads_without_its_head_but_a_base_not_with_one(architecture: str, tmp_path: Path) -> None:
    save_model(tmp_path / "whole", architecture)
    assert not load_model(str(tmp_path / "whole"), pooled=True).is_decoder
    headless = save_model(tmp_path / "headless", architecture, head=False)
    config = json.loads((headless / "config.json").read_bytes())
    if config.get("tie_word_embeddings", True):
        assert load_model(str(headless), pooled=False).is_decoder
        return
    with refusal("weights-incomplete", "weights-of-another-model"):
        load_model(str(headless), pooled=False)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("BertForMaskedLM", "bert"),
        ("BertForSequenceClassification", "bert"),
        ("BertForPreTraining", "bert"),
        ("BertModel", "bert"),
        ("RobertaForMaskedLM", "roberta"),
        ("DistilBertForMaskedLM", "distilbert"),
        ("DistilBertForQuestionAnswering", "distilbert"),
        ("AlbertForSequenceClassification", "albert"),
        ("ModernBertForMaskedLM", "modernbert"),
        ("LlamaForSequenceClassification", "llama"),
    ],
)
def test_unused_heads_of_an_encoder_are_ignored(name: str, architecture: str, tmp_path: Path) -> None:
    import transformers

    getattr(transformers, name)(make_config(architecture)).save_pretrained(tmp_path)
    change_weights(tmp_path, **{"embeddings.position_ids": torch.arange(64)[None]})
    assert not load_model(str(tmp_path), pooled=True).is_decoder


def test_masks_and_frequencies_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64).byte()}
    masks["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    change_weights(save_model(tmp_path / "gpt2", "gpt2"), **masks)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(save_model(tmp_path / "llama", "llama"), **{name: torch.ones(8)})
    assert all(load_model(str(tmp_path / model)).is_decoder for model in ("gpt2", "llama"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no-weights"),
        (
            lambda folder: change_weights(folder, **{NORM: torch.full((64,), torch.nan)}),
            "weights-incomplete",
        ),
        (
            lambda folder: change_weights(folder, **{NORM: torch.full((64,), torch.inf)}),
            "weights-incomplete",
        ),
        (lambda folder: change_weights(folder, **{NORM: torch.ones(65)}), "not-loadable"),
        # No memory is allocated for sizes without weights.
        (
            lambda folder: change_config(folder, hidden_size=1 << 20, intermediate_size=1 << 24),
            "weights-of-another-model",
        ),
    ],
    ids=["missing", "nan", "inf", "shape", "size"],
)
def test_unusable_weights_are_refused(change: Callable[[Path], object], code: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama")
    change(folder)
    with refusal(code):
        load_model(str(folder))


CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
# Changes of a configuration, the code of its refusal (empty if the model without weights can be made), and
# the code of the refusal when its weights are loaded.
HOSTILE: list[tuple[dict[str, Any], str, str]] = [
    ({"hidden_size": 63}, "not-a-transformers-model", ""),
    ({"hidden_size": 1 << 24, "vocab_size": 1 << 24}, "", "weights-of-another-model"),
    ({"num_attention_heads": 7}, "not-a-transformers-model", ""),
    ({"num_key_value_heads": 3}, "", "weights-of-another-model"),
    ({"num_key_value_heads": 1 << 24}, "", "weights-of-another-model"),
    ({"head_dim": 0}, "config-out-of-bounds", ""),
    ({"architectures": 7}, "config-out-of-bounds", ""),
    ({"architectures": [{}]}, "config-out-of-bounds", ""),
    ({"model_type": ["llama"]}, "not-a-transformers-model", ""),
    ({"model_type": None}, "not-a-transformers-model", ""),
    ({"hidden_act": "no such thing"}, "model-not-made", ""),
    ({"rope_scaling": {"rope_type": "longrope", "factor": -1}}, "not-a-transformers-model", ""),
    ({"rope_scaling": {"rope_type": 3}}, "model-not-made", ""),
    ({"rope_parameters": {"rope_type": "no such thing"}}, "model-not-made", ""),
    ({"layer_types": ["no such thing"]}, "not-a-transformers-model", ""),
    ({"torch_dtype": "no such thing"}, "", ""),
    ({"vocab_size": 1}, "", "not-loadable"),
    ({"pad_token_id": 1 << 20}, "model-not-made", ""),
    ({"auto_map": CODE, "model_type": "mine"}, "not-a-transformers-model", ""),
    ({"quantization_config": 3}, "not-a-transformers-model", ""),
    ({"num_experts": "many"}, "", ""),
    ({"text_config": {"a": 1}}, "not-a-transformers-model", ""),
    ({"ngram": 2}, "", ""),
]


@pytest.mark.parametrize(
    ("change", "config_code", "weights_code"), HOSTILE, ids=[str(change)[:50] for change, *_ in HOSTILE]
)
def test_a_hostile_configuration_gives_a_model_or_a_refusal(
    change: dict[str, Any], config_code: str, weights_code: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, "llama")
    change_config(folder, **change)
    (folder / "code.py").write_text("raise SystemExit('code of a checkpoint was run')")
    for load, code in ((load_meta_model, config_code), (load_model, config_code or weights_code)):
        with refusal(code) if code else contextlib.nullcontext():
            assert load(str(folder)).is_decoder


def test_the_cache_setting_of_a_model_is_read(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "llama", use_cache=False)
    assert not read_use_cache(str(folder))


def test_a_decoder_with_a_classification_head_is_refused(tmp_path: Path) -> None:
    make_classifier("llama", 3).save_pretrained(tmp_path)
    with refusal("classifying-decoder"):
        load_meta_model(str(tmp_path))


def test_the_last_layer_of_a_classification_head_is_detached(tmp_path: Path) -> None:
    make_classifier("roberta", 3).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.classifier is not None
    assert loaded.classifier.layer == "classifier.out_proj"
    assert loaded.classifier.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    tokens = torch.arange(3, 9)[None]
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    logits = loaded.classifier.linear(loaded.model(input_ids=tokens).logits)
    assert torch.allclose(logits, whole(input_ids=tokens).logits, atol=1e-6)
    headless = load_model(str(tmp_path), own_head=False)
    assert headless.classifier is None and type(headless.model).__name__ == "RobertaModel"


@pytest.mark.parametrize(
    ("name", "value"), [("num_labels", 1), ("problem_type", "multi_label_classification")]
)
def test_a_head_without_exclusive_classes_is_left_out(tmp_path: Path, name: str, value: object) -> None:
    make_classifier("bert", 2, **{name: value}).save_pretrained(tmp_path)
    assert load_meta_model(str(tmp_path)).classifier is None


@pytest.mark.parametrize("name", ["emu3", *second_tier("mllama")])
def test_a_text_part_has_the_class_of_the_whole_model(tmp_path: Path, name: str) -> None:
    """transformers' table of decoders has only the configuration of the whole model."""
    make_tiny(name).save_pretrained(tmp_path)
    loaded = load_meta_model(str(tmp_path))
    assert loaded.is_decoder and type(loaded.model).__name__.endswith("ForCausalLM")
    assert type(loaded.model).__name__.lower().startswith(name)
