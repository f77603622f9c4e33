"""Rows and texts of models with recurrences, whole and in pieces, are those of transformers' own model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.speaking import ChainSpeaker
from prge.engine import Call
from prge.files import chain as manifest
from prge.model_spec import ModelSpec
from server_export.adapter.layers import match_target_modules
from server_export.oracle import TorchEngine
from tests.device_runner.engines.chains import call_of, directions_of, logits_of, slope_of, split
from tests.device_runner.engines.graph_blocks import GraphBlocks
from tests.server_export.derive.tangent.graphs import random
from tests.server_export.derive.test_blocks import IN_BLOCKS
from tests.templates import random_adapter
from tests.tiers import rest
from tests.tiny_models import RECURRENT, save_model

torch.set_num_threads(1)

TOKENS, PIECE = 20, 8


@pytest.fixture(scope="module", params=["lfm2", *rest(*(name for name in RECURRENT if name != "lfm2"))])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TorchEngine]:
    """Blocks of a model, and what PyTorch computes of it."""
    folder = save_model(tmp_path_factory.mktemp("recurrent") / "model", request.param)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    lora_a = {
        name: random(2, model.get_submodule(name).in_features, dtype=torch.float32) * 0.1
        for name in match_target_modules(model, IN_BLOCKS)
    }
    blocks = GraphBlocks(folder, lora_a, manifest.Bounds(tokens=TOKENS, context=48, piece=PIECE))
    return blocks, TorchEngine(model.eval().requires_grad_(False), blocks.chain.model, lora_a)


def calls_of(model: ModelSpec, sequences: int, copies: int = 1) -> Call:
    """Sequences of more pieces than one, and of one."""
    return call_of(model, sequences, copies, lengths=[TOKENS - 1, 4, PIECE + 2])


def test_answers_are_the_models(both: tuple[Any, TorchEngine]) -> None:
    blocks, oracle = both
    call = calls_of(blocks.chain.model, 3, copies=2)
    np.testing.assert_allclose(ChainEngine(blocks, 1).forward(call), oracle.forward(call), atol=2e-5)


def test_the_gradient_is_autograds(both: tuple[Any, TorchEngine]) -> None:
    blocks, oracle = both
    call = calls_of(blocks.chain.model, 3)
    outputs, found = ChainEngine(blocks, 1).vjp(call, slope_of)
    expected, gradient = oracle.vjp(call, slope_of)
    np.testing.assert_allclose(outputs, expected, atol=2e-5)
    assert np.abs(found - gradient).max() < 1e-5 * np.abs(gradient).max()


def test_tangents_are_the_models_derivatives(both: tuple[Any, TorchEngine]) -> None:
    blocks, oracle = both
    model = blocks.chain.model
    call, directions = calls_of(model, 2), directions_of(model, 2, 2)
    tangents, exact = (
        split(model, call, engine.jvp(call, directions)[1]) for engine in (ChainEngine(blocks, 1), oracle)
    )
    for found, expected in zip(tangents, exact, strict=True):
        for query in range(2):
            atol = 1e-5 * np.abs(expected[query]).max()
            np.testing.assert_allclose(found[query], expected[query], atol=atol)


def test_texts_go_on_as_the_whole_model_does(both: tuple[Any, TorchEngine]) -> None:
    """Token by token; several at once, in slots that others left; and again from the start."""
    blocks, oracle = both
    adapter = random_adapter(blocks.chain.modules, 1, 0.3)
    speaker = ChainSpeaker(blocks, slots=3)

    def expected(tokens: list[int]) -> Any:
        return logits_of(oracle, adapter, tokens)[-1]

    prompts = [np.random.default_rng(n).integers(3, 100, n).tolist() for n in (1, 2, 7, 19)]
    open_ones = {}
    for prompt in prompts:
        if len(open_ones) == 3:
            speaker.close(open_ones.popitem()[0])
        sequence = speaker.open(adapter)
        logits, tokens = speaker.feed(sequence, prompt), list(prompt)
        for _ in range(4):
            np.testing.assert_allclose(logits, expected(tokens), atol=2e-5)
            tokens.append(int(logits.argmax()))
            logits = speaker.step({sequence: tokens[-1]})[sequence]
        open_ones[sequence] = tokens
    first = next(iter(open_ones))
    speaker.close(first)
    del open_ones[first]
    for sequence, logits in speaker.step(dict.fromkeys(reversed(open_ones), 9)).items():
        np.testing.assert_allclose(logits, expected([*open_ones[sequence], 9]), atol=2e-5)
    # What was carried can't go back: the sequence is read from its beginning.
    sequence, tokens = open_ones.popitem()
    speaker.rewind(sequence, 4)
    assert speaker.length(sequence) == 0
    np.testing.assert_allclose(speaker.feed(sequence, tokens[:6]), expected(tokens[:6]), atol=2e-5)
