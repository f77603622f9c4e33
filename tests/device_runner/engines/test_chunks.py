"""Rows longer than a call are computed in chunks with the same bits in any company, or refused.

test_models.py compares the outputs with the model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner.engines.forward import Forward
from prge.engine import Call
from prge.errors import BundleError, EngineError
from prge.formats import chain
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.signatures import BACKWARD, FORWARD, JVP, PREFILL, PREFILL_BACKWARD, PREFILL_JVP
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
from tests.tiers import second_tier
from tests.tiny_models import save_model
from tests.workshop import FolderBuilder

pytestmark = needs_compiler

# Rows have up to five calls' tokens; windows of tiny models are shorter than a call.
TOKENS, CHUNK = 40, 8


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute rows of more than two calls' tokens in chunks, later ones in shorter chunks."""
    monkeypatch.setattr(chain, "MAX_WHOLE_TOKENS", 2 * CHUNK)
    monkeypatch.setattr(chain, "_CHUNK", CHUNK)
    monkeypatch.setattr(chain, "_MAX_SCORES", 4 * CHUNK * 20)
    monkeypatch.setattr(chain, "_MIN_CHUNK", 2)


@pytest.fixture(params=["llama", *second_tier("gemma3", "llama lora")])
def folder(request: pytest.FixtureRequest, made_once: FolderBuilder) -> Path:
    architecture, *adapter = request.param.split()
    more: dict[str, Any] = {"adapter": adapter[0]} if adapter else {}
    roles = ["forward", "jvp", "backward"]

    def make(target: Path) -> object:
        return export_chain(target, architecture, sequence_length=TOKENS, roles=roles, context=TOKENS, **more)

    return made_once(f"chunks of {request.param}", make)


def calls_of(bundle: Bundle, sequences: int, copies: int = 1) -> Call:
    """Return sequences of all lengths, the longest first."""
    lengths = [TOKENS, 5, 2 * CHUNK + 1, 27, CHUNK]
    return call_of(bundle.chain.model, sequences, copies, lengths=lengths)


def test_an_export_for_long_rows_has_chunks(folder: Path) -> None:
    result = open_bundle(folder / "bundle").chain
    assert (result.bounds.tokens, result.bounds.chunk) == (TOKENS, CHUNK)
    assert {PREFILL, PREFILL_JVP, PREFILL_BACKWARD} <= set(result.roles)
    assert result.longest(BACKWARD) == result.model.sequence_length == TOKENS


def test_the_bits_depend_on_the_row_alone(folder: Path) -> None:
    """The bits don't depend on other rows, the engine, or the loaded weights."""
    bundle = open_bundle(folder / "bundle")
    call, engine = calls_of(bundle, 5), opened(bundle, FORWARD).engine
    result = split(bundle.chain.model, call, engine.forward(call))
    for number in (0, 3):
        one = replace(call, sequences=call.sequences[number : number + 1])
        assert engine.forward(one).tobytes() == result[number].tobytes()
    call = calls_of(bundle, 2)
    whole = bits(computed(opened(bundle, BACKWARD).engine, BACKWARD, call))
    min_bytes = max(bundle.file(block.weights).stat().st_size for block in bundle.chain.blocks[1:])
    for other in (opened(bundle, BACKWARD, loaded=min_bytes), opened(bundle, BACKWARD, "torch")):
        assert bits(computed(other.engine, BACKWARD, call)) == whole


@pytest.mark.parametrize("copies", [1, 2])
def test_chunks_that_rows_have_in_common_are_computed_once_for_each_copy(
    folder: Path, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(folder / "bundle")
    opened_engine = opened(bundle, FORWARD)
    call = call_of(bundle.chain.model, 4, copies, lengths=[3 * CHUNK])
    first, others = call.sequences[0], call.sequences[1:]
    # Two, one and no chunks are those of the first row.
    lengths = (2 * CHUNK, 2 * CHUNK - 1, 3)
    sequences = [
        replace(each, tokens=first.tokens[:count] + each.tokens[count:])
        for each, count in zip(others, lengths, strict=True)
    ]
    call = replace(call, sequences=(first, *sequences))
    runs = []
    run = opened_engine.blocks.run

    def counted(number: int, role: str, *inputs: Any) -> Any:
        runs.append(role)
        return run(number, role, *inputs)

    monkeypatch.setattr(opened_engine.blocks, "run", counted)
    alone = [opened_engine.engine.forward(replace(call, sequences=(each,))) for each in call.sequences]
    separate_runs = runs.count(PREFILL)
    runs.clear()
    result = split(bundle.chain.model, call, opened_engine.engine.forward(call))
    assert bits(result) == bits(alone)
    trunk, adapted = bundle.chain.lowest_adapted, bundle.chain.head_start - bundle.chain.lowest_adapted
    assert runs.count(PREFILL) == separate_runs - 3 * (trunk + copies * adapted)


def test_chunks_in_common_change_no_gradient(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(folder / "bundle")
    first, second = call_of(bundle.chain.model, 2, lengths=[3 * CHUNK]).sequences
    call = replace(calls_of(bundle, 1), sequences=(first, replace(second, tokens=(*first.tokens[:-1], 5))))
    engine = opened(bundle, BACKWARD).engine
    result = bits(computed(engine, BACKWARD, call))
    monkeypatch.setattr(Forward, "_common_prefixes", lambda self, parts: {})
    assert bits(computed(engine, BACKWARD, call)) == result


@pytest.mark.parametrize(("role", "of_chunks"), [(JVP, PREFILL_JVP), (BACKWARD, PREFILL_BACKWARD)])
def test_a_bundle_without_a_role_for_chunks_accepts_only_short_rows_in_that_role(
    folder: Path, role: str, of_chunks: str
) -> None:
    bundle = open_bundle(folder / "bundle")
    programs = tuple(
        replace(program, methods={name: m for name, m in program.methods.items() if name != of_chunks})
        for program in bundle.chain.programs
    )
    bundle = replace(bundle, chain=replace(bundle.chain, programs=programs))
    assert bundle.chain.longest(role) == CHUNK
    assert bundle.chain.longest(FORWARD) == bundle.chain.model.sequence_length == TOKENS
    engine, model = opened(bundle, role).engine, bundle.chain.model
    with raises(EngineError, "sequence-of-other-length", containing=role):
        computed(engine, role, call_of(model, 2, lengths=[8, 9]))
    assert computed(engine, role, call_of(model, 2, lengths=[8]))
    assert engine.forward(call_of(model, 2)).size


def test_chunks_longer_than_rows_are_refused(folder: Path) -> None:
    result = open_bundle(folder / "bundle").chain
    with raises(BundleError, "chain-not-runnable", containing=str(TOKENS + 1)):
        replace(result, bounds=replace(result.bounds, chunk=TOKENS + 1))


@pytest.mark.whole
def test_a_block_of_a_real_shape_at_1024_tokens(
    made_once: FolderBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of Qwen2.5-0.5B and a row of four chunks as in an export, against autograd."""
    monkeypatch.undo()

    def make(target: Path) -> object:
        shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 1024}
        save_model(target / "model", "qwen2", **shape, **heads)
        settings = {"rank": 16, "sequence_length": 1024, "context": 1024, "roles": ["forward", "backward"]}
        return export(ExportConfig(model=str(target / "model"), out=target / "bundle", **settings))

    folder = made_once("a real block in chunks", make)
    bundle = open_bundle(folder / "bundle")
    call = call_of(bundle.chain.model, 1)
    _, result = computed(opened(bundle, BACKWARD).engine, BACKWARD, call)
    _, gradient = computed(oracle_of(folder), BACKWARD, call)
    start = 0
    for matrix in matrices(bundle.chain.modules):
        expected, actual = (each[start : start + matrix.size].astype(float) for each in (gradient, result))
        start += matrix.size
        assert actual @ expected / (np.linalg.norm(actual) * np.linalg.norm(expected)) > 0.999999
        np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max())
