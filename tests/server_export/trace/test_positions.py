"""The number of positions of a model, and its position ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from server_export.checkpoint.loading import LoadedModel
from server_export.trace.positions import first_position, position_count
from tests.tiny_models import make_model
from tests.tiny_types import POSITIONS, make_tiny


@pytest.mark.parametrize(("model_type", "first"), [("bert", 0), ("roberta", 2), ("nystromformer", 2)])
def test_the_first_position_id_is_the_models(model_type: str, first: int, tmp_path: Path) -> None:
    """RoBERTa counts from after its padding token, Nystromformer from 2 in a table with 2 more rows."""
    model = make_tiny(model_type)
    assert first_position(model) == first
    count = position_count(LoadedModel(model, model_type, None, False))
    table = next(each for name, each in model.named_modules() if name.endswith("position_embeddings"))
    assert count == table.num_embeddings - first


def test_a_model_without_a_limit_has_any_number_of_positions() -> None:
    """XLNet's configuration has -1 as its limit."""
    model = make_model("llama")
    assert position_count(LoadedModel(model, "llama", None, True)) == POSITIONS
    model.config.max_position_embeddings = -1
    assert position_count(LoadedModel(model, "llama", None, True)) is None
