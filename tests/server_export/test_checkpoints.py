"""Trained checkpoints, exported and run on the engine, answer what the checkpoints themselves answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from device_runner.engines.opening import open_engines
from prge.files.bundle import open_bundle
from prge.files.peft import read_peft
from server_export.export import ExportConfig, export

torch.set_num_threads(1)
pytestmark = pytest.mark.whole


@pytest.mark.parametrize("name", ["stories260K", "babyllama"])
@pytest.mark.parametrize(("scheme", "mean"), [("fp32", 1e-5), ("8da4w", 0.7)])
def test_decoder(shared: Path, tmp_path: Path, name: str, scheme: str, mean: float) -> None:
    """int4 weights of so small a model are far off."""
    folder = str(shared / "models" / name)
    bundle = open_bundle(
        export(ExportConfig(model=folder, out=tmp_path / "bundle", quantize=scheme, roles=["stack"]))
    )
    assert len(bundle.chain.modules) == 10
    contract = bundle.chain.contract("stack", 3, length=20)
    random = np.random.default_rng(0)
    tokens = random.integers(3, contract.vocabulary_size, (3, 20))
    positions = random.integers(0, 20, (3, 19))
    targets = random.integers(0, contract.vocabulary_size, (3, 19))
    adapter = read_peft(bundle.adapter, contract.modules)
    matrices = {f"lora_b.{module.name}": adapter.lora_b[module.name][None] for module in contract.modules}
    engine = open_engines(bundle, contract, engine="torch").step
    found = engine.forward({"tokens": tokens, "positions": positions, "targets": targets, **matrices})
    checkpoint = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(checkpoint(torch.from_numpy(tokens)).logits, -1).numpy()
    difference = np.abs(found["logprobs"] - logprobs[np.arange(3)[:, None], positions, targets])
    assert difference.mean() < mean
    assert scheme != "fp32" or difference.max() < 3 * mean
