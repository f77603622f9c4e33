"""Rows and texts of models with recurrences, whole and in pieces, are those of transformers' own model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from prge.contract import Contract
from torch.autograd.functional import jvp
from transformers import AutoModelForCausalLM

from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.speaking import ChainSpeaker
from prge.files import chain as manifest
from prge.files.chain import Chain
from prge.model_spec import matrices
from server_export.model.adapted import match_target_modules
from tests.device_runner.engines.chains import Inputs, Whole, inputs_of, loss_of, slope_of
from tests.device_runner.engines.graph_blocks import GraphBlocks
from tests.server_export.derive.tangent.graphs import random
from tests.server_export.derive.test_blocks import IN_BLOCKS
from tests.templates import random_adapter
from tests.tiers import rest
from tests.tiny_models import RECURRENT, save_model

torch.set_num_threads(1)

TOKENS, PIECE = 20, 8


@pytest.fixture(scope="module", params=["lfm2", *rest(*(name for name in RECURRENT if name != "lfm2"))])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Whole]:
    """Blocks of a model, and the model."""
    folder = save_model(tmp_path_factory.mktemp("recurrent") / "model", request.param)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    lora_a = {
        name: random(2, model.get_submodule(name).in_features, dtype=torch.float32) * 0.1
        for name in match_target_modules(model, IN_BLOCKS)
    }
    blocks = GraphBlocks(folder, lora_a, manifest.Bounds(tokens=TOKENS, context=48, piece=PIECE))
    return blocks, Whole(model.eval().requires_grad_(False), lora_a, 1.0, "mean")


def call_of(chain: Chain, role: str, rows: int, **sizes: int) -> tuple[Contract, Inputs]:
    """Rows of more pieces than one, and of one."""
    contract = chain.contract(role, rows, **sizes)
    given = inputs_of(contract)
    given["positions"] %= np.resize([TOKENS, 5, PIECE + 3], contract.rows)[:, None] - 1
    return contract, given


def adapter_of(contract: Contract, given: Inputs, *copy: int) -> dict[str, torch.Tensor]:
    return {each.name: torch.from_numpy(given[each.name][copy]) for each in matrices(contract.modules)}


def rows_of(given: Inputs, rows: slice) -> Inputs:
    return {name: given[name][rows] for name in ("tokens", "positions", "targets")}


def test_answers_are_the_models(both: tuple[Any, Whole]) -> None:
    blocks, whole = both
    contract, given = call_of(blocks.chain, "stack", 3, copies=2)
    found = ChainEngine(contract, blocks, 1).forward(given)["logprobs"]
    for copy in range(2):
        rows = slice(3 * copy, 3 * copy + 3)
        expected = whole.answers(rows_of(given, rows), adapter_of(contract, given, copy))
        np.testing.assert_allclose(found[rows], expected.numpy(), atol=2e-5)


def test_the_gradient_is_autograds(both: tuple[Any, Whole]) -> None:
    blocks, whole = both
    contract, given = call_of(blocks.chain, "back", 3)
    answers, found = ChainEngine(contract, blocks, 1).gradient(given, slope_of)
    adapter = {name: each.requires_grad_() for name, each in adapter_of(contract, given).items()}
    expected = whole.answers(given, adapter)
    loss_of(expected).backward()
    np.testing.assert_allclose(answers, expected.detach().numpy(), atol=2e-5)
    largest = max(float(each.grad.abs().max()) for each in adapter.values() if each.grad is not None)
    for name, each in adapter.items():
        assert each.grad is not None
        assert np.abs(found[name] - each.grad.numpy()).max() < 1e-5 * largest


def test_tangents_are_the_models_derivatives(both: tuple[Any, Whole]) -> None:
    blocks, whole = both
    contract, given = call_of(blocks.chain, "tangent", 2, queries=2)
    found = ChainEngine(contract, blocks, 1).forward(given)["dlogprobs"]
    adapter = adapter_of(contract, given)
    for query in range(2):
        for row in range(2):
            along = {
                each.name: torch.from_numpy(np.outer(given[each.u][query, row], given[each.v][query, row]))
                for each in matrices(contract.modules)
            }
            rows = rows_of(given, slice(row, row + 1))
            _, expected = jvp(
                lambda *given, rows=rows: whole.answers(rows, dict(zip(adapter, given, strict=True))),
                tuple(adapter.values()),
                tuple(along[name] for name in adapter),
            )
            atol = 1e-5 * float(expected.abs().max())
            np.testing.assert_allclose(found[query, row], expected[0].numpy(), atol=atol)


def test_texts_go_on_as_the_whole_model_does(both: tuple[Any, Whole]) -> None:
    """Token by token; several at once, in slots that others left; and again from the start."""
    blocks, whole = both
    adapter = random_adapter(blocks.chain.modules, 1, 0.3)
    given = {name: torch.from_numpy(array) for name, array in adapter.inputs().items()}
    speaker = ChainSpeaker(blocks, slots=3)

    def expected(tokens: list[int]) -> Any:
        with torch.no_grad():
            return whole.logits(torch.tensor([tokens]), given)[0, -1].numpy()

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
