"""Sharded random weights are a model that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prge.errors import ConfigError
from server_export.checkpoint import random_models
from server_export.checkpoint.loading import load_model
from server_export.settings import ExportConfig
from tests.refusals import raises

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}


@pytest.mark.parametrize("tied", [True, False])
def test_shards_load_as_one_model(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smollm2 = random_models.CONFIGURATIONS["smollm2-135m"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    monkeypatch.setitem(random_models.CONFIGURATIONS, "tiny", {**smollm2, **TINY, **heads})
    monkeypatch.setattr(random_models, "SHARD_BYTES", 10_000)
    random_models.save_random_model(tmp_path, "tiny")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) > 2
    assert ("lm_head.weight" in index["weight_map"]) != tied
    model = load_model(str(tmp_path)).model
    weight = model.get_output_embeddings().weight
    assert float(weight.std()) == pytest.approx(0.02, rel=0.1)
    assert bool(torch.equal(weight, model.get_input_embeddings().weight)) == tied


def test_parameter_counts_equal_the_published_ones() -> None:
    """Parameter counts match the names of the architectures."""
    counts = {"smollm2-360m": 361_821_120, "qwen2-0.5b": 494_032_768, "qwen3-1.7b": 1_720_574_976}
    for name, count in counts.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(random_models.random_model_config(name, None))
        assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_a_random_model_is_a_temporary_folder(tmp_path: Path) -> None:
    config = ExportConfig("random:qwen3-1.7b:tiny", str(tmp_path / "out"))
    with random_models.with_random_model(config) as resolved:
        assert Path(resolved.model).parent.parent == tmp_path
        assert load_model(resolved.model).model.num_parameters() < 100_000
    assert not [*tmp_path.iterdir()]
    plain = ExportConfig("somewhere", str(tmp_path / "out"))
    with random_models.with_random_model(plain) as resolved:
        assert resolved is plain
    with raises(ConfigError, "no-such-architecture", containing="random:qwen"):
        random_models.random_model_config("qwen", None)
