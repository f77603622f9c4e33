"""Where several blocks read a value, the driver answers as the whole model does, by graphs of its blocks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from prge.contract import Contract
from transformers import AutoModelForCausalLM

from device_runner.engines import speaking
from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.saved_values import SavedValues
from device_runner.engines.speaking import ChainSpeaker
from prge.files import chain
from prge.files.chain import Bounds
from prge.model_spec import matrices
from server_export.model.adapted import match_target_modules
from tests.device_runner.engines.chains import Inputs, Whole, inputs_of, loss_of, slope_of
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
    whole: Whole
    single: Whole

    def call(self, role: str, rows: int, **sizes: int) -> tuple[Contract, Inputs]:
        """Rows of all lengths, the first the longest."""
        contract = self.blocks.chain.contract(role, rows, **sizes)
        given = inputs_of(contract)
        given["positions"] %= np.array([TOKENS, 5, 2 * PIECE + 1] * contract.rows)[: contract.rows, None] - 1
        return contract, given


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
    double = {name: matrix.double() for name, matrix in lora_a.items()}
    single = Whole(deepcopy(model.requires_grad_(False)), lora_a, 1.0, "mean")
    return Case(blocks, Whole(model.double(), double, 1.0, "mean"), single)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_MOST_SCORES", 4 * PIECE * 20)
    monkeypatch.setattr(chain, "_SHORTEST_PIECE", 2)
    monkeypatch.setattr(speaking, "_GROWTH", 16)


def adapter_of(contract: Contract, given: Inputs, *copy: int) -> dict[str, torch.Tensor]:
    return {
        each.name: torch.from_numpy(given[each.name][copy]).double() for each in matrices(contract.modules)
    }


def rows_of(given: Inputs, rows: slice) -> Inputs:
    return {name: given[name][rows] for name in ("tokens", "positions", "targets")}


def difference(found: Any, expected: torch.Tensor) -> float:
    """As a part of the largest number."""
    return float(np.abs(found - expected.detach().numpy()).max() / expected.detach().abs().max())


def test_answers_of_all_copies_are_the_models(case: Case) -> None:
    contract, given = case.call("stack", 3, copies=2)
    found = ChainEngine(contract, case.blocks, 1).forward(given)["logprobs"]
    for copy in range(2):
        rows = slice(copy * 3, (copy + 1) * 3)
        expected = case.whole.answers(rows_of(given, rows), adapter_of(contract, given, copy))
        assert difference(found[rows], expected) < 1e-5


def test_the_gradient_is_autograds_whatever_is_saved(case: Case) -> None:
    contract, given = case.call("back", 3)
    engines = (
        ChainEngine(contract, case.blocks, 1, saved=saved)
        for saved in (None, SavedValues(case.blocks, 1 << 40))
    )
    (answers, found), (_, from_saved) = (engine.gradient(given, slope_of) for engine in engines)
    adapter = {name: each.requires_grad_() for name, each in adapter_of(contract, given).items()}
    expected = case.whole.answers(given, adapter)
    loss_of(expected).backward()
    assert difference(answers, expected) < 1e-5
    largest = max(float(each.grad.abs().max()) for each in adapter.values() if each.grad is not None)
    for name, each in adapter.items():
        assert each.grad is not None
        assert np.abs(found[name] - each.grad.numpy()).max() < 1e-4 * largest
        # PyTorch's products have other last bits where their operands lie otherwise; test_saved_values.py has
        # the engine's, which don't.
        assert np.abs(found[name] - from_saved[name]).max() < 1e-5 * largest


def test_tangents_are_the_models_derivatives(case: Case) -> None:
    contract, given = case.call("tangent", 3, queries=2)
    found = ChainEngine(contract, case.blocks, 1).forward(given)["dlogprobs"]
    for query, row in ((0, 0), (1, 1), (1, 2)):
        directions = {
            each.name: torch.from_numpy(
                np.outer(given[each.u][query, row], given[each.v][query, row])
            ).double()
            for each in matrices(contract.modules)
        }
        one = rows_of(given, slice(row, row + 1))
        expected, rounded = (
            torch.func.jvp(
                lambda adapter, one=one, whole=whole: whole.answers(one, adapter),
                ({name: each.to(dtype) for name, each in adapter_of(contract, given).items()},),
                ({name: each.to(dtype) for name, each in directions.items()},),
            )[1][0]
            for whole, dtype in ((case.whole, torch.float64), (case.single, torch.float32))
        )
        # Streams that all but cancel lose digits in PyTorch's own single precision as well.
        most = max(1e-4, difference(rounded.numpy(), expected))
        assert difference(found[query, row], expected) < most


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 5e-5), ("float16", 2e-2)])
def test_texts_go_on_token_by_token(case: Case, precision: Any, tolerance: float) -> None:
    """Of two sequences at once, one of which moves to the other's place."""
    adapter = random_adapter(case.blocks.chain.modules, 1, 0.3)
    tokens = np.random.default_rng(0).integers(3, case.blocks.chain.vocabulary_size, TOKENS).tolist()
    given = {name: torch.from_numpy(array).double() for name, array in adapter.inputs().items()}
    expected = case.whole.logits(torch.tensor([tokens]), given)[0]
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
