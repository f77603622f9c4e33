"""Errors of the engine's gradient against autograd: in float32, and through many int4 layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from device_runner.engines.batch import Batch
from device_runner.engines.forward import Forward
from prge.formats.bundle import open_bundle
from prge.formats.signatures import BACKWARD, BACKWARD_SAVED, FORWARD
from server_export.oracle import TorchEngine, load_base_model
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import (
    bits,
    call_of,
    computed,
    export_chain,
    loss_gradient_of,
    opened,
    oracle_of,
)
from tests.tiers import second_tier
from tests.workshop import FolderBuilder

pytestmark = needs_compiler

# Relative to the largest entry; larger where autograd in float32 has a larger error itself.
TOLERANCE = 4e-6
# Multiple of the error where long sums of large values cancel, or add up all layers, which share ALBERT's
# adapter: the engine sums in another order than autograd.
CANCELLING = {"gemma4": 4, "mpnet": 8, "albert lora": 2}
LAYERS = 30
# Architectures that differ in the engine; tests/server_export/derive/test_blocks.py covers all graphs.
ARCHITECTURES = ("gpt2", "gemma3", "opt", "qwen3", "roberta", "gemma4")


@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [
        ("llama", ""),
        *second_tier(
            *((name, "") for name in ("llama lora", *ARCHITECTURES)), ("bert", "mean"), ("bert", "first")
        ),
        *second_tier(("bert lora", "mean"), ("albert", "mean"), ("albert lora", "mean")),
        *second_tier(("deberta-v2", "mean"), ("mpnet", "mean")),
        *second_tier(("olmoe", "")),
    ],
)
def test_float32_gradients_equal_autograds_up_to_rounding(
    architecture: str, pooling: str, make_chain: Callable[[str], Path]
) -> None:
    """A target that occurs twice counts twice."""
    folder = make_chain(architecture)
    bundle = open_bundle(folder / "bundle")
    if pooling:
        bundle = replace(bundle, chain=replace(bundle.chain, pooling=pooling))
    for rows in (1, 3, 9):
        call = call_of(bundle.chain.model, rows)
        (outputs, result), on_torch = (
            computed(opened(bundle, BACKWARD, name).engine, BACKWARD, call) for name in ("native", "torch")
        )
        assert bits((outputs, result)) == bits(on_torch)
        by_dtype = []
        for dtype in (torch.float64, torch.float32):
            oracle = oracle_of(folder, dtype)
            oracle.pooling = pooling or oracle.pooling
            want, gradient = computed(oracle, BACKWARD, call)
            assert np.abs(outputs - want).max() <= 2e-5 * max(1, float(np.abs(want).max()))
            by_dtype.append(gradient)
        expected, rounded = by_dtype
        # Gradients of lora_a also sum over a layer's outputs.
        own = np.abs(rounded - expected).max() * (2 if bundle.chain.trains_a else 1)
        own *= CANCELLING.get(architecture, 1)
        assert np.abs(result - expected).max() <= max(TOLERANCE * np.abs(expected).max(), own)


@pytest.fixture(scope="module")
def deep(made_once: FolderBuilder) -> Path:
    """Return a narrow Llama with many int4 layers."""
    settings: dict[str, Any] = {"layers": LAYERS, "roles": ["backward"], "quantize": "8da4w"}
    return made_once("deep", lambda folder: export_chain(folder, "llama", **settings))


@pytest.mark.whole
@pytest.mark.parametrize("activations", ["rounded", "as they are"])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_through_thirty_quantized_layers_the_gradient_has_the_direction_of_autograds(
    deep: Path, activations: str, scale: float
) -> None:
    """Autograd uses the same rounded weights; rounding of activations has derivative 1.

    The median of five calls counts: autograd's activations aren't rounded, so one call may differ by chance.
    """
    bundle = open_bundle(deep / "bundle")
    base = load_base_model(bundle, str(deep / "model"), rounds_activations=activations == "rounded")
    oracle, cosines, ratios = TorchEngine.of(bundle, base), [], []
    for seed in range(5):
        call = call_of(bundle.chain.model, 4, seed=seed)
        call = replace(call, adapters=np.float32(scale) * call.adapters)
        (_, result), (_, expected) = (
            computed(engine, BACKWARD, call) for engine in (opened(bundle, BACKWARD).engine, oracle)
        )
        cosines.append(float(F.cosine_similarity(*map(torch.from_numpy, (result, expected)), dim=0)))
        ratios.append(float(np.linalg.norm(result) / np.linalg.norm(expected)))
    assert np.median(cosines) >= 0.999
    assert np.median(ratios) == pytest.approx(1, rel=0.02)


@pytest.mark.whole
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("role", "name"),
    [
        (BACKWARD, "grad_hidden_states"),
        (BACKWARD, "hidden_states"),
        (FORWARD, "hidden_states"),
        (BACKWARD_SAVED, "grad_hidden_states"),
        (BACKWARD_SAVED, "hidden_states"),
    ],
)
def test_nan_passes_layers_with_int8_activations(
    deep: Path, monkeypatch: pytest.MonkeyPatch, bad: float, role: str, name: str
) -> None:
    """Rounding NaN to int8 gives a number, and the gradient would be wrong but finite."""
    bundle = open_bundle(deep / "bundle")
    call = call_of(bundle.chain.model, 2)
    weights = sum(bundle.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size))
    memory = 1 << 40 if role == BACKWARD_SAVED else weights
    engine = opened(bundle, BACKWARD, loaded=memory).engine
    before, run = engine.vjp(call, loss_gradient_of)[1], Forward.run

    def broken(self: Forward, number: int, now: str, part: Batch, *second_tier: Any, **more: Any) -> Any:
        if (number, now) == (LAYERS // 2, role):
            part.values[name] = part.values[name].copy()
            part.values[name].ravel()[5] = bad
        return run(self, number, now, part, *second_tier, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Forward, "run", broken)
        assert np.isnan(engine.vjp(call, loss_gradient_of)[1]).all()
    assert engine.vjp(call, loss_gradient_of)[1].tobytes() == before.tobytes()
