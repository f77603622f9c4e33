"""Tables of any length are what transformers' model computes for rows of that length."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from device_runner.engines.tables import Tables
from prge.files.bundle import TABLES
from prge.files.chain import MASKED, Table
from server_export.trace.attention import causal_mask
from server_export.trace.tables import ModelTable, ModelTables, TableRotary, make_rotary_tables
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


def test_a_window_on_both_sides_is_a_table_by_distance() -> None:
    tables = ModelTables(LONGEST)
    # It is traced, and never run.
    with pytest.raises(NotImplementedError):
        tables.window(LENGTH, 3, 2)
    (table,) = tables.all
    for length in (LENGTH, LONGEST):
        place = torch.arange(length)
        mask = torch.where((place[:, None] - place).abs() < 3, 0.0, MASKED)
        assert torch.equal(table.of(length), torch.stack([mask, mask]))


def test_numbers_by_distance_are_those_that_a_device_makes(tmp_path: Path) -> None:
    """Of a token from one behind it on the left, from one before it on the right."""
    values = np.arange(2 * LONGEST - 1)
    table = ModelTable("relative", members=2, values=values)
    expected = [[3, 2, 1], [4, 3, 2], [5, 4, 3]]
    assert table.of(3).tolist() == [(np.array(expected) + LONGEST - 4).tolist()] * 2
    save_file({"0": values}, tmp_path / TABLES)
    described = SimpleNamespace(
        tables=(Table("relative", members=2),),
        roles=(),
        bounds=SimpleNamespace(tokens=LONGEST, context=LONGEST),
    )
    device: Any = Tables(SimpleNamespace(file=lambda name: tmp_path / name), described)  # type: ignore[arg-type]
    assert device.tensor(0, 5) == ("int64", (2, 5, 5))
    assert device.of(0, 5).tolist() == table.of(5).tolist()
