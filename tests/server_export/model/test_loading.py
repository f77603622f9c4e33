"""Loading models: what is accepted, and what a user is told otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from prge.errors import BundleError
from server_export.model.loading import load_model
from tests.tiny_models import save_model


@pytest.mark.parametrize(("architecture", "is_decoder"), [("llama", True), ("gpt2", True), ("bert", False)])
def test_architecture_decides_the_kind(architecture: str, is_decoder: bool, tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path, architecture)))
    assert loaded.is_decoder is is_decoder
    assert not loaded.model.training
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}


def test_pooled_loads_without_the_head(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path, "llama")), pooled=True)
    assert type(loaded.model).__name__ == "LlamaModel"
    assert not loaded.is_decoder


def test_half_precision_checkpoint_is_loaded_as_float32(tmp_path: Path) -> None:
    from tests.tiny_models import make_model

    make_model("llama").half().save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).model.lm_head.weight.dtype == torch.float32


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="there is no folder"):
        load_model(str(tmp_path / "nothing"))


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no config\.json"):
        load_model(str(tmp_path))


def test_weights_missing(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BundleError, match="can't be loaded as a causal language model"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "d_model": 8}, "an encoder-decoder model"),
        ({"model_type": "vit"}, "not a text model"),
        ({"model_type": "mixtral"}, "a mixture of experts"),
        ({"model_type": "no-such-type"}, "can't be read as a transformers model"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantized already",
        ),
    ],
)
def test_unsupported_kinds_are_named(config: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BundleError, match=message):
        load_model(str(tmp_path))
