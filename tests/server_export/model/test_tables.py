"""Tables of any length are what transformers' model computes for rows of that length."""

from __future__ import annotations

import pytest
import torch

from server_export.model.attention import causal_mask
from server_export.model.tables import ModelTable, ModelTables, TableRotary, make_rotary_tables
from tests.tiny_models import make_model

LONGEST, LENGTH = 40, 9


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_rotary_tables_are_the_models(architecture: str) -> None:
    model = make_model(architecture)
    (original,) = (module for module in model.modules() if hasattr(module, "rope_type"))
    with torch.device("meta"):
        outline = make_model(architecture)
    assert make_rotary_tables(outline, ModelTables(LONGEST)) == 1
    (rotary,) = (module for module in outline.modules() if isinstance(module, TableRotary))
    positions = torch.arange(LENGTH).reshape(1, LENGTH)
    for kind, parts in rotary.values.items():
        expected = original(torch.zeros(1), positions, *([] if kind is None else [kind]))
        for part, table in zip(expected, parts, strict=True):
            assert torch.equal(ModelTable("rotary", values=table).of(LENGTH), part)


def test_masks_positions_and_types_follow_the_length() -> None:
    mask = causal_mask(LENGTH, 4, torch.float32)
    assert torch.equal(ModelTable("causal", 4, members=2).of(LENGTH), torch.stack([mask, mask]))
    assert ModelTable("positions", first=2).of(3).tolist() == [[2, 3, 4]]
    assert ModelTable("zeros").of(3).tolist() == [[0, 0, 0]]
