"""Decoders with ways of their own answer as the whole model does, by graphs of their blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.speaking import ChainSpeaker
from prge.files import chain
from prge.files.chain import Bounds
from server_export.adapter.layers import default_target_modules, match_target_modules, read_by_rows
from server_export.checkpoint.loading import load_model, outline_model
from server_export.trace.patterns import unread_modules
from tests.device_runner.engines.chains import Whole, by_autograd, call_of, slope_of
from tests.device_runner.engines.graph_blocks import GraphBlocks
from tests.templates import random_adapter
from tests.tiers import rest
from tests.tiny_types import make_tiny

torch.set_num_threads(1)

TOKENS, PIECE, CONTEXT = 24, 8, 48
WAYS = {
    "bigbird_pegasus": "what it looks up by position is brought to a place where it is",
    "diffllama": "the same scores weigh two halves of the values",
    "doge": "each key has a number that is added to its scores",
    "glm_moe_dsa": "an indexer chooses what tokens are seen, and of short texts all",
    "qwen4_exp_text": "layers hand on streams, and have experts",
    "git": "it has an encoder of images, and asks for its mask itself",
    "rwkv": "a mean of what came before, and tokens that are moved by one",
    "moshi": "it reads a word that it doesn't say",
}


@pytest.fixture(params=["doge", *rest(*(name for name in WAYS if name != "doge"))])
def case(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[GraphBlocks, Whole]:
    """Blocks for rows in pieces, and the model in double precision."""
    for name, number in {"MOST_WHOLE_TOKENS": 2 * PIECE, "_SHORT": PIECE, "_SHORTEST_PIECE": 2}.items():
        monkeypatch.setattr(chain, name, number)
    make_tiny(request.param).save_pretrained(tmp_path)
    outline: Any = outline_model(str(tmp_path)).model
    unread = unread_modules(outline)
    names = match_target_modules(outline, default_target_modules(outline, unread), unread)
    # Layers for what an encoder made are never asked.
    names = read_by_rows(outline, names) or names
    generator = torch.Generator().manual_seed(0)
    lora_a = {
        name: 0.3 * torch.randn(2, outline.get_submodule(name).in_features, generator=generator)
        for name in names
    }
    blocks = GraphBlocks(tmp_path, lora_a, Bounds(tokens=TOKENS, context=CONTEXT, piece=PIECE))
    model: Any = load_model(str(tmp_path)).model
    model.set_experts_implementation("eager")
    double = {name: each.double() for name, each in lora_a.items()}
    return blocks, Whole(model.double(), blocks.chain.modules, double)


def test_gradients_and_logits_are_those_of_the_whole_model(case: tuple[GraphBlocks, Whole]) -> None:
    blocks, whole = case
    call = call_of(blocks.chain.model, 3)
    expected, gradient = by_autograd(whole, call)
    outputs, found = ChainEngine(blocks, 1).vjp(call, slope_of)  # type: ignore[arg-type]
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    assert np.abs(found - gradient).max() < 1e-4 * np.abs(gradient).max()

    tokens = np.random.default_rng(0).integers(3, blocks.chain.vocabulary_size, TOKENS).tolist()
    own = random_adapter(blocks.chain.modules, 1, 0.3)
    logits = whole.logits(torch.tensor([tokens]), torch.from_numpy(own.values).double())[0].detach().numpy()
    speaker = ChainSpeaker(blocks, 1)
    sequence = speaker.open(own)
    np.testing.assert_allclose(speaker.feed(sequence, tokens[:-2]), logits[-3], atol=1e-4)
    for place in (-2, -1):
        np.testing.assert_allclose(
            speaker.step({sequence: tokens[place]})[sequence], logits[place], atol=1e-4
        )
