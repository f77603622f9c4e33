"""Where several blocks read a value, the driver answers as the whole model does, by graphs of its blocks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from device_runner.engines import speaking
from device_runner.engines.activations import ActivationStore
from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.speaking import ChainSpeaker
from prge.engine import Array, Call
from prge.files import chain
from prge.files.chain import Bounds
from server_export.adapter.layers import match_target_modules
from server_export.oracle import TorchEngine
from tests.device_runner.engines.chains import call_of, directions_of, logits_of, slope_of, split
from tests.device_runner.engines.graph_blocks import GraphBlocks
from tests.templates import random_adapter
from tests.tiers import rest
from tests.tiny_models import save_model

torch.set_num_threads(1)

TOKENS, PIECE, CONTEXT = 40, 8, 48


@dataclass(frozen=True)
class Case:
    """Blocks, and the model in double precision and in single."""

    blocks: Any
    oracle: TorchEngine
    single: TorchEngine

    def call(self, sequences: int, copies: int = 1) -> Call:
        """Sequences of all lengths, the first the longest."""
        lengths = [TOKENS, 5, 2 * PIECE + 1]
        # Some other tokens give gradients that PyTorch is off of too, in single precision.
        return call_of(self.blocks.chain.model, sequences, copies, lengths=lengths, seed=1)


# Gemmas have streams or one state, inputs for each layer, and keys and values of layers before; with an
# adapter on the last layer alone nothing changes what it takes. Zamba's layers share weights.
@pytest.fixture(scope="module", params=["gemma4", *rest("gemma3n", "gemma4 top", "zamba2")])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture, *top = request.param.split()
    folder = save_model(tmp_path_factory.mktemp("shared") / "model", architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    names = match_target_modules(model, ["q_proj", "v_proj", "o_proj", "down_proj"])
    generator = torch.Generator().manual_seed(0)
    lora_a = {
        name: 0.3 * torch.randn(2, model.get_submodule(name).in_features, generator=generator)
        for name in names
        if not top or ".3." in name
    }
    blocks = GraphBlocks(folder, lora_a, Bounds(tokens=TOKENS, context=CONTEXT, piece=PIECE))
    single = TorchEngine(model.requires_grad_(False), blocks.chain.model, lora_a)
    double = TorchEngine(deepcopy(model), blocks.chain.model, lora_a).to(torch.float64)
    return Case(blocks, double, single)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_MOST_SCORES", 4 * PIECE * 20)
    monkeypatch.setattr(chain, "_SHORTEST_PIECE", 2)
    monkeypatch.setattr(speaking, "_GROWTH", 16)


def difference(found: Array, expected: Array) -> float:
    """As a part of the largest number."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_answers_of_all_copies_are_the_models(case: Case) -> None:
    call = case.call(3, copies=2)
    found = ChainEngine(case.blocks, 1).forward(call)
    for ours, expected in zip(found, case.oracle.forward(call), strict=True):
        assert difference(ours, expected) < 1e-5


def test_the_gradient_is_autograds_whatever_is_saved(case: Case) -> None:
    call = case.call(3)
    engines = (
        ChainEngine(case.blocks, 1, ActivationStore(case.blocks, residual_bytes=most))
        for most in (None, 1 << 40)
    )
    (outputs, found), (_, from_saved) = (engine.vjp(call, slope_of) for engine in engines)
    expected, gradient = case.oracle.vjp(call, slope_of)
    assert difference(outputs, expected) < 1e-5
    assert difference(found, gradient) < 1e-4
    # PyTorch's products have other last bits where their operands lie otherwise; test_activations.py has the
    # engine's, which don't.
    assert np.abs(found - from_saved).max() < 1e-5 * np.abs(gradient).max()


def test_tangents_are_the_models_derivatives(case: Case) -> None:
    model = case.blocks.chain.model
    call, directions = case.call(3), directions_of(model, 2, 3)
    tangents, exact, rounded = (
        split(model, call, engine.jvp(call, directions)[1])
        for engine in (ChainEngine(case.blocks, 1), case.oracle, case.single)
    )
    for query, number in ((0, 0), (1, 1), (1, 2)):
        expected = exact[number][query]
        # Streams that all but cancel lose digits in PyTorch's own single precision as well.
        most = max(1e-4, difference(rounded[number][query], expected))
        assert difference(tangents[number][query], expected) < most


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 5e-5), ("float16", 2e-2)])
def test_texts_go_on_token_by_token(case: Case, precision: Any, tolerance: float) -> None:
    """Of two sequences at once, one of which moves to the other's place."""
    adapter = random_adapter(case.blocks.chain.modules, 1, 0.3)
    tokens = np.random.default_rng(0).integers(3, case.blocks.chain.vocabulary_size, TOKENS).tolist()
    expected = logits_of(case.oracle, adapter, tokens)
    speaker = ChainSpeaker(case.blocks, 2, precision=precision)
    first, second = speaker.open(adapter), speaker.open(adapter)
    assert difference(speaker.feed(first, tokens[:9]), expected[8]) < tolerance
    speaker.feed(second, tokens[:4])
    for place in range(9, 24):
        found = speaker.step({second: tokens[speaker.length(second)], first: tokens[place]})
        assert difference(found[first], expected[place]) < tolerance
        assert difference(found[second], expected[speaker.length(second) - 1]) < tolerance
    speaker.close(first)
    found = speaker.step({second: tokens[19]})
    assert difference(found[second], expected[19]) < tolerance
    third = speaker.open(adapter)
    speaker.feed(third, tokens[:1])
    assert difference(speaker.feed(third, tokens[1:]), expected[-1]) < tolerance
