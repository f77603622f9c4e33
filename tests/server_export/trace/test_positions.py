"""How many positions a model has, and rows of any length while it is traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from server_export.checkpoint.loading import LoadedModel, outline_model
from server_export.trace.positions import any_length, first_position, position_count
from tests.tiny_models import make_model
from tests.tiny_types import POSITIONS, make_tiny

TOKENS, MORE = 100, 3


@pytest.mark.parametrize(
    ("model_type", "name", "dims"),
    [
        ("bert", "embeddings.position_embeddings.weight", (0,)),
        ("bert", "embeddings.position_ids", (1,)),
        ("gpt_neo", "transformer.h.0.attn.attention.bias", (2, 3)),
    ],
)
def test_tables_and_masks_of_positions_are_longer_while_a_row_is_traced(
    model_type: str, name: str, dims: tuple[int, ...], tmp_path: Path
) -> None:
    make_tiny(model_type).save_pretrained(tmp_path)
    model = outline_model(str(tmp_path)).model

    def found() -> torch.Tensor:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]

    before = found()
    with any_length(model, TOKENS, MORE) as own:
        assert own[name] is before
        assert {found().shape[dim] for dim in dims} == {TOKENS + MORE}
    assert found() is before
    assert {before.shape[dim] for dim in dims} == {POSITIONS}


def test_biases_of_all_positions_are_made_for_the_row_alone() -> None:
    """MPT makes as many as it has positions, and takes the last."""
    config: Any = make_tiny("mpt").config
    model: Any = torch.nn.Module()
    model.config = config
    with any_length(model, TOKENS, MORE):
        assert config.max_seq_len == TOKENS
    assert config.max_seq_len == POSITIONS


@pytest.mark.parametrize(("model_type", "first"), [("bert", 0), ("roberta", 2), ("nystromformer", 2)])
def test_positions_are_numbered_as_the_model_does(model_type: str, first: int, tmp_path: Path) -> None:
    """RoBERTa counts from after its padding, Nystromformer from two, in a table that has two rows more."""
    model = make_tiny(model_type)
    assert first_position(model) == first
    count = position_count(LoadedModel(model, model_type, None, False))
    table = next(each for name, each in model.named_modules() if name.endswith("position_embeddings"))
    assert count == table.num_embeddings - first


def test_a_model_without_a_number_of_positions_has_any() -> None:
    """XLNet says -1."""
    model = make_model("llama")
    assert position_count(LoadedModel(model, "llama", None, True)) == POSITIONS
    model.config.max_position_embeddings = -1
    assert position_count(LoadedModel(model, "llama", None, True)) is None
