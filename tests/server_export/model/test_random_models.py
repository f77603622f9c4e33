"""Random weights in shards are a model that transformers loads whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from server_export.model import random_models
from server_export.model.loading import load_model

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}


@pytest.mark.parametrize("tied", [True, False])
def test_shards_are_a_whole_model(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = random_models.CONFIGURATIONS["smollm2-135m"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    monkeypatch.setitem(random_models.CONFIGURATIONS, "tiny", {**known, **TINY, **heads})
    monkeypatch.setattr(random_models, "_SHARD_BYTES", 10_000)
    random_models.save_random_model(tmp_path, "tiny")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) > 2
    assert ("lm_head.weight" in index["weight_map"]) != tied
    model = load_model(str(tmp_path)).model
    weight = model.get_output_embeddings().weight
    assert float(weight.std()) == pytest.approx(0.02, rel=0.1)
    assert bool(torch.equal(weight, model.get_input_embeddings().weight)) == tied
