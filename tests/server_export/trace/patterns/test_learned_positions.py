"""While a row of any length is traced, everything that a model has per position is resized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server_export.checkpoint.loading import load_meta_model
from server_export.trace.patterns.learned_positions import any_length
from tests.tiny_types import POSITIONS, make_tiny

TOKENS, EXTRA = 100, 3


@pytest.mark.parametrize(
    ("model_type", "name", "dims"),
    [
        ("bert", "embeddings.position_embeddings.weight", (0,)),
        ("bert", "embeddings.position_ids", (1,)),
        ("gpt_neo", "transformer.h.0.attn.attention.bias", (2, 3)),
    ],
)
def test_position_tables_and_masks_are_resized_while_tracing(
    model_type: str, name: str, dims: tuple[int, ...], tmp_path: Path
) -> None:
    make_tiny(model_type).save_pretrained(tmp_path)
    model = load_meta_model(str(tmp_path)).model

    def tensor() -> torch.Tensor:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]

    before = tensor()
    with any_length(model, TOKENS, EXTRA):
        assert {tensor().shape[dim] for dim in dims} == {TOKENS + EXTRA}
    assert tensor() is before
    assert {before.shape[dim] for dim in dims} == {POSITIONS}
