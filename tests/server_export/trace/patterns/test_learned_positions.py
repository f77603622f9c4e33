"""Rows of any length while a model with something for each position is traced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server_export.checkpoint.loading import load_meta_model
from server_export.trace.patterns.learned_positions import any_length
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
    model = load_meta_model(str(tmp_path)).model

    def found() -> torch.Tensor:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]

    before = found()
    with any_length(model, TOKENS, MORE):
        assert {found().shape[dim] for dim in dims} == {TOKENS + MORE}
    assert found() is before
    assert {before.shape[dim] for dim in dims} == {POSITIONS}
