"""Calibration of a chain as in an export: its messages, and the bundle's table of layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from prge.formats.layers import StoredLayer
from server_export.calibrate.calibration import calibrate
from tests.server_export.calibrate.chains import ROWS, int4_chain


def test_the_table_has_every_layer_with_its_bits(tmp_path: Path) -> None:
    calibration = calibrate(int4_chain(tmp_path, "llama"), ROWS, 5.0, tmp_path / "codes")
    stored = {"model.layers.0.mlp.up_proj": StoredLayer("weights/000.ptd", 0, 64, (2, 64))}
    table = calibration.table(stored)
    assert len(table) == 14 and {entry["bits"] for entry in table.values()} == {4, 8}
    assert table["model.layers.0.mlp.up_proj"].get("codes") in (0, None)
    int8 = {name for name, entry in table.items() if entry["bits"] == 8}
    assert int8 == set(calibration.report.per_channel) - {"lm_head"}
    assert calibration.report.to_json()["rounding"]["weight_bits"] <= 5.0
    calibration.remove_codes()
    assert not (tmp_path / "codes").exists()


def test_layers_with_too_few_tokens_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = int4_chain(tmp_path, "llama")
    calibrate(chain, ROWS, 4.0, tmp_path / "many")
    assert "too few" not in capsys.readouterr().out
    calibrate(chain, ROWS[:1], 4.0, tmp_path / "few")
    assert "14 layers see too few tokens and are rounded to the nearest" in capsys.readouterr().out
