"""Rows that are longer than a call: in chunks with the same bits whatever else is computed, or refused.

test_models.py compares what comes out with the model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prge.engine import Call
from prge.errors import BundleError, EngineError
from prge.files import chain
from prge.files.bundle import Bundle, open_bundle
from prge.files.signatures import BACK, PREFILL, PREFILL_BACK, PREFILL_TANGENT, STACK, TANGENT
from prge.model_spec import matrices
from server_export.export import ExportConfig, export
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import (
    bits,
    call_of,
    computed,
    export_chain,
    opened,
    oracle_of,
    split,
)
from tests.refusals import raises
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


def calls_of(bundle: Bundle, sequences: int, copies: int = 1) -> Call:
    """Sequences of all lengths, the first the longest."""
    lengths = [TOKENS, 5, 2 * PIECE + 1, 27, PIECE]
    return call_of(bundle.chain.model, sequences, copies, lengths=lengths)


def test_an_export_for_long_rows_has_pieces(folder: Path) -> None:
    found = open_bundle(folder / "bundle").chain
    assert (found.bounds.tokens, found.bounds.piece) == (TOKENS, PIECE)
    assert {PREFILL, PREFILL_TANGENT, PREFILL_BACK} <= set(found.roles)
    assert found.longest(BACK) == found.model.sequence_length == TOKENS


def test_the_bits_follow_from_the_row_alone(folder: Path) -> None:
    """Not from the rows beside it, the engine, or the weights that stay loaded."""
    bundle = open_bundle(folder / "bundle")
    call, engine = calls_of(bundle, 5), opened(bundle, STACK).engine
    found = split(bundle.chain.model, call, engine.forward(call))
    for number in (0, 3):
        one = replace(call, sequences=call.sequences[number : number + 1])
        assert engine.forward(one).tobytes() == found[number].tobytes()
    call = calls_of(bundle, 2)
    whole = bits(computed(opened(bundle, BACK).engine, BACK, call))
    least = max(bundle.file(block.weights).stat().st_size for block in bundle.chain.blocks[1:])
    for other in (opened(bundle, BACK, loaded=least), opened(bundle, BACK, "torch")):
        assert bits(computed(other.engine, BACK, call)) == whole


@pytest.mark.parametrize(("role", "of_pieces"), [(TANGENT, PREFILL_TANGENT), (BACK, PREFILL_BACK)])
def test_a_bundle_without_a_role_of_pieces_takes_short_rows_in_it(
    folder: Path, role: str, of_pieces: str
) -> None:
    bundle = open_bundle(folder / "bundle")
    kinds = tuple(
        replace(kind, methods={name: m for name, m in kind.methods.items() if name != of_pieces})
        for kind in bundle.chain.kinds
    )
    bundle = replace(bundle, chain=replace(bundle.chain, kinds=kinds))
    assert bundle.chain.longest(role) == PIECE
    assert bundle.chain.longest(STACK) == bundle.chain.model.sequence_length == TOKENS
    engine, model = opened(bundle, role).engine, bundle.chain.model
    with raises(EngineError, "sequence-of-other-length", saying=role):
        computed(engine, role, call_of(model, 2, lengths=[8, 9]))
    assert computed(engine, role, call_of(model, 2, lengths=[8]))
    assert engine.forward(call_of(model, 2)).size


def test_pieces_longer_than_rows_are_refused(folder: Path) -> None:
    found = open_bundle(folder / "bundle").chain
    with raises(BundleError, "chain-not-runnable", saying=str(TOKENS + 1)):
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
    bundle = open_bundle(folder / "bundle")
    call = call_of(bundle.chain.model, 1)
    _, found = computed(opened(bundle, BACK).engine, BACK, call)
    _, gradient = computed(oracle_of(folder), BACK, call)
    start = 0
    for matrix in matrices(bundle.chain.modules):
        expected, ours = (each[start : start + matrix.size].astype(float) for each in (gradient, found))
        start += matrix.size
        assert ours @ expected / (np.linalg.norm(ours) * np.linalg.norm(expected)) > 0.999999
        np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())
