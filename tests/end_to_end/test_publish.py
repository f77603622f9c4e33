"""Publishing what real runs trained, on tangents and on differences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from prge.cli import main
from prge.files.peft import read_arrays
from tests.verbs import prge


@pytest.mark.parametrize("kind", ["tangent", "antithetic"])
def test_a_run_is_published_after_its_model_was_compared(
    run_words: list[object], workshop: Path, tmp_path: Path, kind: str
) -> None:
    run, out = tmp_path / "run", tmp_path / "adapter"
    prge("run", *run_words, "--estimator", kind)
    # Naming the model has its content compared with what the bundle was exported from.
    assert main(["publish", str(run), "--model", str(workshop / "model"), "--out", str(out)]) == 0
    published, trained = (
        read_arrays(folder / "adapter_model.safetensors") for folder in (out, run / "final")
    )
    assert published.keys() == trained.keys()
    assert all(np.array_equal(published[name], trained[name]) for name in trained)
    card = (out / "README.md").read_text()
    assert ("arXiv 2409.15520" in card) == ("| epsilon " in card) == (kind == "antithetic")
    assert ("exact derivatives" in card) == ("| share directions " in card) == (kind == "tangent")
    for private in ("train.jsonl", "dev.jsonl", "task.yaml", str(workshop)):
        assert not any(private in path.read_text(errors="replace") for path in out.iterdir())


def test_a_tangent_run_is_merged_into_its_model(
    run_words: list[object], workshop: Path, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "merged"
    prge("run", *run_words)
    assert main(["publish", str(run), "--format", "merged", "--out", str(out)]) == 0
    name = "model.layers.0.self_attn.q_proj"
    before, after = (
        safetensors.numpy.load_file(folder / "model.safetensors")[f"{name}.weight"]
        for folder in (workshop / "model", out)
    )
    adapter = read_arrays(run / "final/adapter_model.safetensors")
    config = json.loads((run / "final/adapter_config.json").read_text())
    a, b = (adapter[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    np.testing.assert_allclose(after - before, config["lora_alpha"] / config["r"] * b @ a, atol=1e-6)
    assert np.abs(after - before).max() > 1e-4
