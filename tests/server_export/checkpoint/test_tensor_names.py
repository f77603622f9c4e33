"""Names of stored tensors by transformers' conversion, compared with the model that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import load_meta_model
from server_export.checkpoint.weights import CheckpointWeights

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
}


def save_model(folder: Path, name: str, **settings: Any) -> Any:
    """Save a model of a configuration class with the names of published checkpoints; return it."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, name)(**settings)
    auto_class = (
        transformers.AutoModelForMultimodalLM if config.sub_configs else transformers.AutoModelForCausalLM
    )
    model = auto_class.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def weights_of(folder: Path) -> tuple[CheckpointWeights, torch.nn.Module]:
    outline = load_meta_model(str(folder)).model
    return CheckpointWeights(find_files(str(folder)), outline), outline


def test_a_head_with_another_name_is_located(tmp_path: Path) -> None:
    settings = {name: size for name, size in _SIZES.items() if "key" not in name and name != "head_dim"}
    model = save_model(tmp_path, "GPTNeoXConfig", **settings)
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")
    weights, _ = weights_of(tmp_path)
    assert torch.equal(weights.read("lm_head.weight"), model.lm_head.weight)


def test_tensors_that_are_stored_separately_are_converted(tmp_path: Path) -> None:
    """The checkpoint stores experts one by one; the model stacks them in one tensor."""
    import transformers

    from server_export.checkpoint.tensor_names import WeightShapes, tensor_sources

    config = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = save_model(tmp_path, "Qwen3MoeConfig", **config)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert name not in stored
    with torch.device("meta"):
        outline = transformers.AutoModelForCausalLM.from_config(model.config)
    source = tensor_sources(outline, stored.keys())[name]
    assert len(source.stored) == 8
    tensors = source.convert_tensors(stored.__getitem__, WeightShapes(outline))
    assert torch.equal(tensors[name], model.get_parameter(name))


# Configuration classes of multimodal models, and the settings of their parts.
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_SETTINGS = {
    "Gemma3Config": {"text_config": _SIZES, "vision_config": _VISION},
    "Mistral3Config": {"text_config": {**_SIZES, "model_type": "mistral"}, "vision_config": _VISION},
}


@pytest.mark.parametrize("name", _SETTINGS)
def test_the_text_part_of_a_checkpoint_is_located(name: str, tmp_path: Path) -> None:
    """The text part returns the logits of the whole model for text."""
    from server_export.checkpoint.loading import load_model

    whole = save_model(tmp_path, name, **_SETTINGS[name])
    loaded = load_model(str(tmp_path))
    tokens = torch.randint(3, 60, (2, 7))
    with torch.no_grad():
        assert torch.allclose(loaded.model(tokens).logits, whole(input_ids=tokens).logits, atol=1e-5)
