"""Weights are read one at a time by transformers' names of a model's parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from server_export.adapter.layers import conv1d_names
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import load_meta_model, load_model
from server_export.checkpoint.weights import CheckpointWeights
from tests.refusals import refusal
from tests.tiny_models import make_model, make_tokenizer, save_model


def weights_of(folder: Path) -> CheckpointWeights:
    outline = load_meta_model(str(folder)).model
    transposed = {f"{name}.weight" for name in conv1d_names(outline)}
    return CheckpointWeights(find_files(str(folder)), outline, transposed)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "bert", "distilbert"])
def test_every_parameter_equals_the_loaded_models(architecture: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", architecture)
    model = load_model(str(folder)).model
    transposed = {f"{name}.weight" for name in conv1d_names(model)}
    weights = weights_of(folder)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        weight = weights.read(name)
        assert torch.equal(weight.t() if name in transposed else weight, parameter), name


def test_a_tied_head_is_the_embedding_table(tmp_path: Path) -> None:
    weights = weights_of(save_model(tmp_path / "model", "llama"))
    assert torch.equal(weights.read("lm_head.weight"), weights.read("model.embed_tokens.weight"))


def test_computed_buffers_are_not_stored(tmp_path: Path) -> None:
    weights = weights_of(save_model(tmp_path / "model", "gemma3"))
    assert float(weights.read("model.embed_tokens.embed_scale")) == 8.0


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "model", max_shard_size="40KB")
    make_tokenizer().save_pretrained(tmp_path / "model")
    files = find_files(str(tmp_path / "model"))
    assert len(files.weights) > 1
    weights = weights_of(tmp_path / "model")
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.read(name), parameter)


def test_missing_misshapen_and_infinite_weights_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.inf
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 96)
    save_file(tensors, folder / "model.safetensors")
    weights = weights_of(folder)
    with refusal("weights-of-another-shape"):
        weights.read("model.layers.1.mlp.up_proj.weight")
    with refusal("weights-incomplete"):
        weights.read("model.norm.weight")
    with refusal("weights-not-finite"):
        weights.read("model.layers.0.mlp.up_proj.weight")


def test_rows_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(save_model(tmp_path / "model", "llama"))
    whole, counts = weights.read("lm_head.weight"), list[int]()
    read = weights.read

    def read_and_count(name: str, rows: range) -> torch.Tensor:
        counts.append(len(rows))
        return read(name, rows)

    monkeypatch.setattr(weights, "read", read_and_count)
    assert torch.equal(torch.cat([*weights.iter_rows("lm_head.weight", 100)]), whole)
    assert max(counts) == 100
    assert sum(counts) == len(whole)


def test_parts_of_a_bad_table_are_refused_like_the_whole(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama")
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    table[-1, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with refusal("weights-not-finite"):
        list(weights_of(folder).iter_rows("model.embed_tokens.weight", 100))
    tensors["model.embed_tokens.weight"] = table[:100].clone()
    save_file(tensors, folder / "model.safetensors")
    with refusal("weights-of-another-shape"):
        list(weights_of(folder).iter_rows("model.embed_tokens.weight", 100))
