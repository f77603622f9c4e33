"""`prge probe` on real bundles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.verbs import prge


def probed(bundle: Path, workshop: Path, out: Path) -> dict[str, Any]:
    """What a probe of a bundle on the training rows found."""
    words = ["--data", workshop / "train.jsonl", "--task", workshop / "task.yaml", "--json", out]
    text = prge("probe", bundle, *words, "--epsilons", 3e-3, 0.3).stdout
    found: dict[str, Any] = json.loads(out.read_text())
    assert text.rstrip().endswith(found["recommendation"])
    return found


def test_small_differences_follow_the_tangents(workshop: Path, tmp_path: Path) -> None:
    found = probed(workshop / "bundle", workshop, tmp_path / "found.json")
    best = found["best"]
    assert (best["estimator"], best["epsilon"]) == ("antithetic", 3e-3)
    assert best["r"] > 0.999 and best["slope"] == pytest.approx(1, abs=0.02)
    assert min(reading["r"] for reading in found["readings"]) < 0.9
