"""A model without weights computes what the loaded model does, while its weights are read one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

from server_export.checkpoint import lazy_weights
from server_export.checkpoint.files import find_files
from server_export.checkpoint.lazy_weights import LazyWeights
from server_export.checkpoint.loading import load_meta_model, load_model
from server_export.checkpoint.weights import CheckpointWeights
from tests.tiers import second_tier
from tests.tiny_models import (
    DECODERS,
    ENCODERS,
    EXPERTS,
    RECURRENT,
    SHARING,
    UNUSUAL,
    VOCABULARY,
    WIDTH,
    save_model,
)

TOKENS = torch.tensor([[5, 9, 9, 70], [5, 3, 127, 0]])
FIRST = ["llama", "gpt2", "gemma3", "bert", "mixtral", "llama4", "mamba2"]


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output = model(input_ids=TOKENS)
    values: torch.Tensor = output[0]
    return values


def load_lazily(folder: Path) -> tuple[Any, LazyWeights]:
    """Return a model without weights, and its lazy weights."""
    model = load_meta_model(str(folder)).model
    return model, LazyWeights(CheckpointWeights(find_files(str(folder)), model))


@pytest.mark.parametrize(
    "architecture",
    [
        *FIRST,
        *second_tier(
            *(
                name
                for name in {**DECODERS, **ENCODERS, **EXPERTS, **SHARING, **RECURRENT, **UNUSUAL}
                if name not in FIRST
            )
        ),
    ],
)
def test_a_model_without_weights_computes_what_the_loaded_one_does(architecture: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, architecture)
    loaded = load_model(str(folder)).model
    model, weights = load_lazily(folder)
    for each in (loaded, model):
        if hasattr(each.config, "num_local_experts") or hasattr(each.config, "num_experts"):
            each.set_experts_implementation("eager")
    weights_by_name = weights.of(model)
    computed = outputs(lambda **named: functional_call(model, weights_by_name, kwargs=named))
    assert torch.equal(computed, outputs(loaded))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.fixture
def weights_by_name(tmp_path: Path) -> dict[str, torch.Tensor]:
    model, weights = load_lazily(save_model(tmp_path, "mixtral"))
    return weights.of(model)


def record_reads(weight: Any) -> list[Any]:
    """Return a list to which the rows of all later reads of a weight are appended."""
    read, reads = weight.read, list[Any]()

    def read_and_record(rows: Any) -> torch.Tensor:
        reads.append(rows)
        values: torch.Tensor = read(rows)
        return values

    weight.read = read_and_record
    return reads


def test_an_embedding_reads_the_rows_of_its_tokens(weights_by_name: dict[str, torch.Tensor]) -> None:
    table = weights_by_name["model.embed_tokens.weight"]
    whole = table + 0
    rows = record_reads(table)
    assert torch.equal(torch.nn.functional.embedding(TOKENS, table), whole[TOKENS])
    assert rows == [[0, 3, 5, 9, 70, 127]]


def test_a_mixture_reads_one_expert(weights_by_name: dict[str, torch.Tensor]) -> None:
    stack = weights_by_name["model.layers.0.mlp.experts.down_proj"]
    whole = stack + 0
    rows = record_reads(stack)
    assert torch.equal(stack[torch.tensor(3)], whole[3]) and torch.equal(stack[-1], whole[7])
    assert rows == [range(3, 4), range(7, 8)]


def test_a_large_layer_is_read_in_parts_of_its_rows(
    weights_by_name: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_weights, "ELEMENTS_PER_READ", 48 * WIDTH)
    head, states = weights_by_name["lm_head.weight"], torch.randn(2, 3, WIDTH)
    expected = torch.nn.functional.linear(states, head + 0)
    rows = record_reads(head)
    torch.testing.assert_close(torch.nn.functional.linear(states, head), expected)
    assert rows == [range(48), range(48, 96), range(96, VOCABULARY)]


def test_metadata_of_a_weight_reads_nothing(weights_by_name: dict[str, torch.Tensor]) -> None:
    head = weights_by_name["lm_head.weight"]
    rows = record_reads(head)
    assert head.shape == (VOCABULARY, WIDTH) and head.dtype == torch.float32 and head.size(0) == VOCABULARY
    # A model puts new tensors on the device of its weights.
    assert head.device == torch.device("cpu") and not head.is_meta
    assert rows == []
