"""LoRA, both matrices of which are trained, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prge.files.peft import PeftAdapter, read_lora
from tests.end_to_end.test_exact import losses, words_of
from tests.tiers import rest
from tests.verbs import prge


def both(bundle: Path, run: Path) -> tuple[PeftAdapter, PeftAdapter]:
    """What a run began with, and what it trained."""
    return read_lora(bundle / "adapter"), read_lora(run / "final")


@pytest.mark.parametrize("estimator", ["exact", *rest("tangent", "antithetic")])
def test_both_matrices_learn(workshop: Path, lora_bundle: Path, tmp_path: Path, estimator: str) -> None:
    words = words_of(workshop, lora_bundle, tmp_path / "run")
    words[words.index("exact")] = estimator
    prge(*words)
    before, *_, after = losses(tmp_path / "run")
    assert after < (0.2 if estimator == "exact" else 0.99) * before
    start, found = both(lora_bundle, tmp_path / "run")
    assert start.lora_a.keys() == found.lora_a.keys()
    for name in start.lora_a:
        assert not np.array_equal(start.lora_a[name], found.lora_a[name]), name
        assert found.lora_b[name].any(), name
    assert json.loads((tmp_path / "run/run.json").read_text())["train"]["trained_values"] == sum(
        matrix.size for matrices in (found.lora_a, found.lora_b) for matrix in matrices.values()
    )


def test_lora_plus_moves_lora_b_further(workshop: Path, lora_bundle: Path, tmp_path: Path) -> None:
    """Adam's first step is the learning rate, whatever the gradient."""
    for ratio in (1, 8):
        words = words_of(workshop, lora_bundle, tmp_path / f"{ratio}", steps=1)
        prge(*words, "--lora-plus", ratio)
    (start, plain), (_, plus) = (both(lora_bundle, tmp_path / f"{ratio}") for ratio in (1, 8))
    for name in start.lora_b:
        np.testing.assert_allclose(plus.lora_b[name], 8 * plain.lora_b[name], rtol=1e-5)
        assert np.array_equal(plus.lora_a[name], plain.lora_a[name])


def test_it_is_scored_served_and_started_from(workshop: Path, lora_bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prge(*words_of(workshop, lora_bundle, run))
    written = {}
    for bundle in (lora_bundle, workshop / "bundle"):
        words = ["--prompt", "aa bb", "--adapter", run, "--max-tokens", 4, "--json"]
        written[bundle.name] = json.loads(prge("generate", "--bundle", bundle, *words).stdout)["tokens"]
    # One in whose programs lora_a is a constant takes it as an input where it writes.
    assert written["lora"] == written["bundle"]
    prge(*words_of(workshop, lora_bundle, tmp_path / "on", steps=2), "--adapter", run)
    refused = prge(*words_of(workshop, workshop / "bundle", tmp_path / "no"), "--adapter", run, check=False)
    told = refused.stderr
    assert refused.returncode == 2 and "lora_A" in told and "--start-adapter" in told


def test_what_needs_lora_says_so(workshop: Path, tmp_path: Path) -> None:
    refused = prge(*words_of(workshop, workshop / "bundle", tmp_path / "run"), "--lora-plus", 4, check=False)
    told = refused.stderr
    assert refused.returncode == 2 and "--lora-plus is 4" in told and "export with --adapter lora" in told
