"""A model without weights computes what the loaded one does, while its weights are read one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

from server_export.checkpoint import lazy_weights
from server_export.checkpoint.files import find_files
from server_export.checkpoint.lazy_weights import LazyWeights
from server_export.checkpoint.loading import load_model, outline_model
from server_export.checkpoint.weights import Weights
from tests.tiers import rest
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


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output = model(input_ids=TOKENS)
    values: torch.Tensor = output[0]
    return values


def lazily(folder: Path) -> tuple[Any, LazyWeights]:
    """A model without weights, and these."""
    model = outline_model(str(folder)).model
    return model, LazyWeights(Weights(find_files(str(folder)), model))


@pytest.mark.parametrize(
    "architecture",
    [
        *FIRST,
        *rest(
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
    model, weights = lazily(folder)
    for each in (loaded, model):
        if hasattr(each.config, "num_local_experts") or hasattr(each.config, "num_experts"):
            each.set_experts_implementation("eager")
    given = weights.of(model)
    found = answer(lambda **named: functional_call(model, given, kwargs=named))
    assert torch.equal(found, answer(loaded))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, torch.Tensor]:
    model, weights = lazily(save_model(tmp_path, "mixtral"))
    return weights.of(model)


def watched(weight: Any) -> list[Any]:
    """The rows that are read of a weight from now on."""
    read, seen = weight.read, list[Any]()

    def watch(rows: Any) -> torch.Tensor:
        seen.append(rows)
        values: torch.Tensor = read(rows)
        return values

    weight.read = watch
    return seen


def test_an_embedding_reads_the_rows_of_its_tokens(parts: dict[str, torch.Tensor]) -> None:
    table = parts["model.embed_tokens.weight"]
    whole = table + 0
    rows = watched(table)
    assert torch.equal(torch.nn.functional.embedding(TOKENS, table), whole[TOKENS])
    assert rows == [[0, 3, 5, 9, 70, 127]]


def test_a_mixture_reads_one_expert(parts: dict[str, torch.Tensor]) -> None:
    stack = parts["model.layers.0.mlp.experts.down_proj"]
    whole = stack + 0
    rows = watched(stack)
    assert torch.equal(stack[torch.tensor(3)], whole[3]) and torch.equal(stack[-1], whole[7])
    assert rows == [range(3, 4), range(7, 8)]


def test_a_large_layer_is_read_some_rows_at_a_time(
    parts: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_weights, "NUMBERS_AT_ONCE", 48 * WIDTH)
    head, states = parts["lm_head.weight"], torch.randn(2, 3, WIDTH)
    expected = torch.nn.functional.linear(states, head + 0)
    rows = watched(head)
    torch.testing.assert_close(torch.nn.functional.linear(states, head), expected)
    assert rows == [range(48), range(48, 96), range(96, VOCABULARY)]


def test_what_is_known_of_a_weight_without_its_numbers_reads_nothing(parts: dict[str, torch.Tensor]) -> None:
    head = parts["lm_head.weight"]
    rows = watched(head)
    assert head.shape == (VOCABULARY, WIDTH) and head.dtype == torch.float32 and head.size(0) == VOCABULARY
    # A model puts what it makes where its weights are.
    assert head.device == torch.device("cpu") and not head.is_meta
    assert rows == []
