"""Finite differences without rounding agree with exact derivatives, and less so with a large epsilon."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from gradient_noise import study


@pytest.mark.whole
def test_small_differences_follow_exact_derivatives(workshop: Path) -> None:
    flags = {"bundle": workshop / "bundle", "data": [workshop / "train.jsonl"], "adapter": None, "seed": 42}
    task = str(workshop / "task.yaml")
    small, large = 1e-3, 3.0
    sizes = {"queries": 2, "batch_size": 2, "batches": 3, "epsilons": [small, large]}
    result = study(argparse.Namespace(task=task, **flags, **sizes))
    assert result["quantization"] is None and result["projected_gradients"] == 6
    agreement = result["differences"]
    assert agreement[f"antithetic {small:g}"]["r"] > 0.99 > agreement[f"antithetic {large:g}"]["r"]
    assert agreement[f"antithetic {small:g}"]["slope"] == pytest.approx(1, abs=0.02)
