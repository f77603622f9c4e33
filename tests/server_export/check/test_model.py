"""The comparison of an export with transformers' model detects a single changed weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prge.errors import Refusal
from server_export.check import model as check
from server_export.check.model import ModelComparison, check_causal, compare_with_model
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import load_meta_model
from server_export.checkpoint.stored import SafetensorsTensors
from server_export.checkpoint.weights import CheckpointWeights
from server_export.export import export
from server_export.model.chain import ModelChain
from server_export.pipeline import build_chain
from server_export.settings import ExportConfig
from tests.gguf_files import write_gguf
from tests.refusals import raises, refusal
from tests.tiers import second_tier
from tests.tiny_models import make_model, make_tokenizer, save_model
from tests.tiny_types import make_classifier, make_tiny

LONGEST = 16


class ChangedWeights(CheckpointWeights):
    """The weights of blocks, with one value of one weight changed."""

    def __init__(self, weights: CheckpointWeights, name: str, change: float) -> None:
        vars(self).update(vars(weights))
        self.name, self.change = name, change

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        tensor = super().read(name, rows).clone()
        if name == self.name:
            tensor[(0,) * tensor.dim()] += self.change
        return tensor


def chain_of(folder: Path) -> ModelChain:
    """Return the blocks of a model without adapted layers."""
    return build_chain(load_meta_model(str(folder)), find_files(str(folder)), {}, longest=LONGEST)


def compare(folder: Path, changed: str | None = None, change: float = 2.0) -> ModelComparison:
    chain = chain_of(folder)
    if changed is not None:
        chain = replace(chain, weights=ChangedWeights(chain.weights, changed, change))
    return compare_with_model(chain, str(folder), None)


def llama(folder: Path) -> Path:
    return save_model(folder, "llama")


def mixture(folder: Path) -> Path:
    return save_model(folder, "mixtral")


def gguf(folder: Path) -> Path:
    folder.mkdir()
    return write_gguf(folder / "tiny.gguf", make_model("llama"), make_tokenizer(), "Q8_0")


def recurrent(folder: Path) -> Path:
    return save_model(folder, "qwen3_5")


def classifier(folder: Path) -> Path:
    make_classifier("bert", 3).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


LAYER = "model.layers.1.self_attn.o_proj.weight"
# A model, a weight of its blocks, and the change: weights of a layer, of tied embeddings, of an expert, of a
# GGUF file, of a recurrence, and of the second to last layer of a classification head.
CHANGED: dict[str, tuple[Callable[[Path], Path], str, float]] = {
    "layer": (llama, LAYER, 2.0),
    "tied": (llama, "lm_head.weight", 2.0),
    "expert": (mixture, "model.layers.0.mlp.experts.down_proj", 2.0),
    "gguf": (gguf, LAYER, 2.0),
    # A large decay, so that the head keeps its state.
    "recurrence": (recurrent, "model.layers.0.linear_attn.A_log", -6.0),
    "classifier": (classifier, "bert.pooler.dense.weight", 2.0),
}


@pytest.mark.parametrize("case", [*CHANGED])
def test_one_changed_weight_is_detected(case: str, tmp_path: Path) -> None:
    make, name, change = CHANGED[case]
    folder = make(tmp_path / "model")
    same = compare(folder)
    assert same.difference < 1e-5 < same.allowed < 2e-3
    with refusal("differs-from-model"):
        compare(folder, name, change)


def test_the_first_layer_that_differs_is_named(tmp_path: Path) -> None:
    folder = llama(tmp_path / "model")
    with refusal("differs-from-model") as refused:
        compare(folder, LAYER)
    assert "the outputs of model.layers.0 are equal, those of model.layers.1 differ" in str(refused.value)


def test_experts_that_no_token_is_routed_to_are_counted(tmp_path: Path) -> None:
    comparison = compare(mixture(tmp_path / "model"))
    called, total = comparison.experts
    assert 0 < called < total == 8
    assert f"{called} of 8 experts were called" in comparison.describe()
    assert comparison.to_json()["experts"] == (called, total)


@pytest.mark.parametrize("architecture", ["llama", *second_tier("mixtral", "gpt2", "bert")])
def test_no_more_than_a_layer_is_read_at_once(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the embedding table nor the weights of all experts are in memory at once."""
    folder = save_model(tmp_path / "model", architecture, vocab_size=1024)
    chain = chain_of(folder)
    sizes, read = list[int](), SafetensorsTensors.read

    def watched(self: SafetensorsTensors, name: str, rows: Any = None) -> torch.Tensor:
        tensor = read(self, name, rows)
        sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(SafetensorsTensors, "read", watched)
    monkeypatch.setattr("server_export.checkpoint.lazy_weights.ELEMENTS_PER_READ", 64 * 96)
    monkeypatch.setattr(check, "with_scheme", lambda chain, scheme: chain)
    compare_with_model(chain, str(folder), None)
    # A block of the head has a shard of the vocabulary, which is all of it for so small a model.
    limit = 64 * 1024 if chain.is_decoder else 64 * 192
    assert sizes and max(sizes) <= limit


def test_a_decoder_that_attends_to_later_tokens_is_refused(tmp_path: Path) -> None:
    model = make_tiny("bert-generation")
    model.config.is_decoder = False
    model.save_pretrained(tmp_path)
    with refusal("not-causal"):
        check_causal(str(tmp_path), None, find_files(str(tmp_path)))


def test_a_model_that_transformers_cant_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = llama(tmp_path / "model")
    chain = chain_of(folder)

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("shapes don't fit")

    monkeypatch.setattr("transformers.LlamaModel.forward", broken)
    with raises(Refusal, "model-fails-in-transformers", containing="ValueError: shapes don't fit"):
        compare_with_model(chain, str(folder), None)


def test_an_export_of_a_changed_model_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export compares models of any size."""
    folder = llama(tmp_path / "model")
    chain = chain_of(folder)
    changed = ChangedWeights(chain.weights, LAYER, 2.0)
    monkeypatch.setattr("server_export.source.build_chain", lambda *_, **__: replace(chain, weights=changed))
    with refusal("differs-from-model"):
        export(ExportConfig(str(folder), tmp_path / "out" / "bundle", sequence_length=LONGEST))
    assert not [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize("make", [llama, classifier])
def test_unexpected_weights_are_refused(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """The files have weights of another architecture than that of the configuration."""
    folder = make(tmp_path / "model")
    weights = folder / "model.safetensors"
    prefix = "bert" if make is classifier else "model"
    save_file({**load_file(weights), f"{prefix}.spare": torch.zeros(3)}, weights, metadata={"format": "pt"})
    with raises(Refusal, "weights-incomplete", containing=f"{prefix}.spare"):
        compare(folder)
