"""A row that is longer than a call is answered, and learnt from, as the model does with the whole row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prge.contract import Contract

from prge.errors import BundleError
from prge.files import chain
from prge.files.bundle import Bundle, open_bundle
from prge.files.signatures import PREFILL, PREFILL_BACK, PREFILL_TANGENT
from prge.model_spec import matrices
from server_export.export import ExportConfig, export
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import (
    Inputs,
    Whole,
    computed,
    export_chain,
    inputs_of,
    loss_of,
    opened,
)
from tests.tiers import rest
from tests.tiny_models import save_model
from tests.workshop import Made

pytestmark = needs_compiler

# Rows have up to five calls' tokens; windows of tiny models are shorter than a call.
TOKENS, PIECE = 40, 8


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than two calls' tokens go in pieces, later ones in shorter pieces."""
    monkeypatch.setattr(chain, "MOST_WHOLE_TOKENS", 2 * PIECE)
    monkeypatch.setattr(chain, "_SHORT", PIECE)
    monkeypatch.setattr(chain, "_MOST_SCORES", 4 * PIECE * 20)
    monkeypatch.setattr(chain, "_SHORTEST_PIECE", 2)


@pytest.fixture(params=["llama", *rest("gemma3", "llama lora")])
def folder(request: pytest.FixtureRequest, made_once: Made) -> Path:
    architecture, *adapter = request.param.split()
    more: dict[str, Any] = {"adapter": adapter[0]} if adapter else {}
    roles = ["stack", "tangent", "back"]

    def make(place: Path) -> object:
        return export_chain(place, architecture, sequence_length=TOKENS, roles=roles, context=TOKENS, **more)

    return made_once(f"pieces of {request.param}", make)


def call_of(bundle: Bundle, role: str, rows: int, **sizes: int) -> tuple[Contract, Inputs]:
    """Rows of all lengths, the first the longest."""
    contract = bundle.chain.contract(role, rows, **sizes)
    given = inputs_of(contract)
    lengths = np.array([TOKENS, 5, 2 * PIECE + 1, 27, PIECE] * contract.rows)[: contract.rows, None]
    given["positions"] %= lengths - 1
    return contract, given


def adapter_of(contract: Contract, given: Inputs, *copy: int) -> dict[str, torch.Tensor]:
    return {each.name: torch.from_numpy(given[each.name][copy]) for each in matrices(contract.modules)}


def rows_of(given: Inputs, rows: slice) -> Inputs:
    return {name: given[name][rows] for name in ("tokens", "positions", "targets")}


def test_an_export_for_long_rows_has_pieces(folder: Path) -> None:
    found = open_bundle(folder / "bundle").chain
    assert (found.bounds.tokens, found.bounds.piece) == (TOKENS, PIECE)
    assert {PREFILL, PREFILL_TANGENT, PREFILL_BACK} <= set(found.roles)
    assert found.contract("back", 1).sequence_length == TOKENS


@pytest.mark.parametrize(("copies", "batch"), [(1, 5), (3, 2)])
def test_answers_of_all_copies_are_the_models(folder: Path, copies: int, batch: int) -> None:
    bundle, whole = open_bundle(folder / "bundle"), Whole.of(folder)
    contract, given = call_of(bundle, "stack", batch, copies=copies)
    found = computed(opened(bundle, contract).step, given)["logprobs"]
    for copy in range(copies):
        rows = slice(copy * batch, (copy + 1) * batch)
        expected = whole.answers(rows_of(given, rows), adapter_of(contract, given, copy))
        np.testing.assert_allclose(found[rows], expected.detach().numpy(), atol=2e-5)


def test_the_gradient_is_autograds(folder: Path) -> None:
    bundle, whole = open_bundle(folder / "bundle"), Whole.of(folder)
    contract, given = call_of(bundle, "back", 5)
    found = computed(opened(bundle, contract).step, given)
    adapter = {name: each.requires_grad_() for name, each in adapter_of(contract, given).items()}
    answers = whole.answers(given, adapter)
    loss_of(answers).backward()
    np.testing.assert_allclose(found["logprobs"], answers.detach().numpy(), atol=2e-5)
    largest = max(float(each.grad.abs().max()) for each in adapter.values() if each.grad is not None)
    for name, each in adapter.items():
        assert each.grad is not None
        assert np.abs(found[name] - each.grad.numpy()).max() < 1e-5 * largest


def test_tangents_are_the_models_derivatives(folder: Path) -> None:
    bundle, whole = open_bundle(folder / "bundle"), Whole.of(folder)
    contract, given = call_of(bundle, "tangent", 3, queries=2)
    found = computed(opened(bundle, contract).step, given)
    adapter = adapter_of(contract, given)
    for query in range(contract.queries):
        for row in range(contract.rows):
            one = rows_of(given, slice(row, row + 1))
            directions = {
                each.name: torch.from_numpy(np.outer(given[each.u][query, row], given[each.v][query, row]))
                for each in matrices(contract.modules)
            }
            answers, expected = torch.func.jvp(
                lambda adapter, one=one: whole.answers(one, adapter), (adapter,), (directions,)
            )
            np.testing.assert_allclose(found["logprobs"][row], answers[0], atol=2e-5)
            scale = max(1.0, float(expected.abs().max()))
            np.testing.assert_allclose(found["dlogprobs"][query, row], expected[0], atol=2e-5 * scale)


def test_the_bits_follow_from_the_row_alone(folder: Path) -> None:
    """Not from the rows beside it, the engine, or the weights that stay loaded."""
    bundle = open_bundle(folder / "bundle")
    contract, given = call_of(bundle, "stack", 5)
    found = computed(opened(bundle, contract).step, given)["logprobs"]
    alone = bundle.chain.contract("stack", 1)
    for row in (0, 3):
        one = {**given, **rows_of(given, slice(row, row + 1))}
        assert computed(opened(bundle, alone).step, one)["logprobs"].tobytes() == found[row].tobytes()
    contract, given = call_of(bundle, "back", 2)
    whole = computed(opened(bundle, contract).step, given)
    least = max(bundle.file(block.weights).stat().st_size for block in bundle.chain.blocks[1:])
    for other in (opened(bundle, contract, loaded=least), opened(bundle, contract, "torch")):
        assert {name: array.tobytes() for name, array in computed(other.step, given).items()} == {
            name: array.tobytes() for name, array in whole.items()
        }


def test_a_bundle_without_the_way_back_of_pieces_takes_short_rows(folder: Path) -> None:
    """Its contract is for what a call holds."""
    found = open_bundle(folder / "bundle").chain
    kinds = tuple(
        replace(kind, methods={role: m for role, m in kind.methods.items() if role != PREFILL_BACK})
        for kind in found.kinds
    )
    assert replace(found, kinds=kinds).contract("back", 1).sequence_length == PIECE


def test_pieces_longer_than_rows_are_refused(folder: Path) -> None:
    found = open_bundle(folder / "bundle").chain
    with pytest.raises(BundleError, match="pieces of rows have 41 tokens, rows 40"):
        replace(found, bounds=replace(found.bounds, piece=TOKENS + 1))


@pytest.mark.whole
def test_a_block_of_a_real_shape_at_1024_tokens(made_once: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2.5-0.5B's block and a row of four pieces as an export cuts them, against autograd."""
    monkeypatch.undo()

    def make(place: Path) -> object:
        shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 1024}
        save_model(place / "model", "qwen2", **shape, **heads)
        settings = {"rank": 16, "sequence_length": 1024, "context": 1024, "roles": ["stack", "back"]}
        return export(ExportConfig(model=str(place / "model"), out=place / "bundle", **settings))

    folder = made_once("a real block in pieces", make)
    bundle, whole = open_bundle(folder / "bundle"), Whole.of(folder)
    contract = bundle.chain.contract("back", 1)
    given = inputs_of(contract)
    found = computed(opened(bundle, contract).step, given)
    adapter = {name: each.requires_grad_() for name, each in adapter_of(contract, given).items()}
    loss_of(whole.answers(given, adapter)).backward()
    for name, each in adapter.items():
        assert each.grad is not None
        expected = each.grad.numpy().ravel().astype(float)
        ours = found[name].ravel().astype(float)
        assert ours @ expected / (np.linalg.norm(ours) * np.linalg.norm(expected)) > 0.999999
        np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())
