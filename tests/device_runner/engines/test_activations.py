"""Checkpoints are kept as they are; residuals spare the backward pass work; neither changes a bit."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from device_runner.engines import blocks as blocks_module
from device_runner.engines.activations import ActivationStore
from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.opening import OpenEngine
from prge.engine import Call, FloatArray, Target, TokenSequence
from prge.errors import RunError
from prge.files.bundle import Bundle, open_bundle
from prge.files.chain import Bounds
from prge.files.signatures import BACK, BACK_SAVED, OF_BACK, SAVE, STACK
from tests.bundles import read_json, write_manifest
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import TOKENS, bits, call_of, computed, export_chain, opened
from tests.refusals import raises
from tests.tiers import rest
from tests.workshop import Made

ENOUGH = 1 << 40
# More than a tiny chain has, and than a call of it is divided into.
MOST_BLOCKS, MOST_PARTS = 32, 64
STATES = [np.random.default_rng(n).standard_normal((1, 2, 5, 3)).astype(np.float32) for n in range(6)]


def new_store(**settings: Any) -> ActivationStore:
    """One of a chain whose blocks save nothing."""
    chain = SimpleNamespace(end=1, lowest_adapted=1, blocks=[None], bounds=Bounds())
    blocks: Any = SimpleNamespace(chain=chain)
    return ActivationStore(blocks, **settings)


def restored(store: ActivationStore, states: list[FloatArray]) -> list[FloatArray]:
    """States of one part of a call, as its backward pass has them."""
    store.begin([state.size for state in states], [], 0)
    for state in states:
        store.keep(0, {"state": state})
    found = []
    for _ in states:
        with store.restored(0) as arrays:
            found.insert(0, arrays["state"].copy())
    return found


@pytest.mark.parametrize("most", [None, 0, 10**6], ids=["no bound", "in a file", "below the bound"])
def test_checkpoints_are_kept_to_the_bit(tmp_path: Path, most: int | None) -> None:
    store = new_store(folder=tmp_path, checkpoint_bytes=most)
    for _ in range(2):
        for found, state in zip(restored(store, STATES), STATES, strict=True):
            assert found.dtype == np.float32 and np.array_equal(found, state)
    assert os.listdir(tmp_path) == []


def test_a_state_may_change_once_it_is_kept() -> None:
    store, state = new_store(), STATES[0].copy()
    store.begin([state.size], [], 0)
    store.keep(0, {"state": state})
    state[:] = 0
    with store.restored(0) as arrays:
        assert np.array_equal(arrays["state"], STATES[0])


def test_parts_of_a_call_have_checkpoints_of_their_own() -> None:
    store = new_store()
    store.begin([state.size for state in STATES[:4]], [], 0)
    for number, state in enumerate(STATES[:4]):
        store.keep(number % 2, {"state": state})
    for number in (3, 2, 1, 0):
        with store.restored(number % 2) as arrays:
            assert np.array_equal(arrays["state"], STATES[number])


def test_half_the_memory_rounds() -> None:
    for found, state in zip(restored(new_store(precision="float16"), STATES), STATES, strict=True):
        assert found.dtype == np.float32 and np.array_equal(found, state.astype(np.float16))


def test_a_state_beyond_the_range_of_float16_is_kept_in_float32() -> None:
    state = np.array([[[[1e5, -1.0]]]], np.float32)
    assert np.array_equal(restored(new_store(precision="float16"), [state])[0], state)


@pytest.mark.parametrize(
    ("most", "residual_bytes", "is_left"),
    [(None, None, False), (None, 1000, True), (0, None, True)],
    ids=["in memory", "beside room for residuals", "in a file"],
)
def test_memory_is_given_back_after_a_call(
    tmp_path: Path, most: int | None, residual_bytes: int | None, is_left: bool
) -> None:
    store = new_store(folder=tmp_path, checkpoint_bytes=most, residual_bytes=residual_bytes)
    store.begin([STATES[0].size], [], 0)
    store.keep(0, {"state": STATES[0]})
    with store.restored(0) as arrays:
        base: Any = arrays.pop("state").base
    room = weakref.ref(base)
    del base
    store.end()
    assert (room() is not None) == is_left
    assert all(np.array_equal(f, s) for f, s in zip(restored(store, STATES), STATES, strict=True))


def test_a_larger_call_follows_a_smaller_one(tmp_path: Path) -> None:
    store = new_store(folder=tmp_path, checkpoint_bytes=0)
    restored(store, [np.zeros((1, 1, 1, 2), np.float32)])
    assert all(np.array_equal(f, s) for f, s in zip(restored(store, STATES), STATES, strict=True))


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with raises(RunError, "storage-full", saying=os.strerror(28)) as caught:
        restored(new_store(folder=tmp_path, checkpoint_bytes=0), STATES)
    assert caught.value.remedy
    assert os.listdir(tmp_path) == []


@pytest.fixture(
    scope="module",
    params=["llama", *rest("llama lora", "llama 8da4w", "gpt2 8da8w", "bert", "bert lora", "gemma4")],
)
def bundle(request: pytest.FixtureRequest, make_chain: Callable[[str], Path], made_once: Made) -> Bundle:
    name, _, kind = request.param.partition(" ")
    if not kind.startswith("8"):
        return open_bundle(make_chain(request.param) / "bundle")
    settings: dict[str, Any] = {"quantize": kind, "roles": [BACK]}
    return open_bundle(
        made_once(f"saved {request.param}", lambda folder: export_chain(folder, name, **settings)) / "bundle"
    )


def gradient(programs: OpenEngine, call: Call, most: int) -> tuple[list[bytes], ActivationStore]:
    """Outputs and gradient of the second of two steps with so much room."""
    store = ActivationStore(programs.blocks, residual_bytes=most)
    engine = ChainEngine(programs.blocks, 1, store)
    for _ in range(2):
        found = computed(engine, BACK, call)
    return bits(found), store


def sizes(store: ActivationStore) -> dict[int, int]:
    """Bytes of the arrays of each block that saves, the last block first."""
    found = dict[int, int]()
    for number, part in product(reversed(range(MOST_BLOCKS)), range(MOST_PARTS)):
        with suppress(IndexError):
            for residual in store.residuals(number, part).values():
                found[number] = found.get(number, 0) + residual.values.nbytes
    return found


@needs_compiler
@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("rows", [1, 3, 9])
@needs_compiler
def test_whatever_is_saved_the_gradient_has_the_same_bits(bundle: Bundle, rows: int, engine: str) -> None:
    """None, then one block more at a time, from the last one down."""
    call = call_of(bundle.chain.model, rows)
    programs = opened(bundle, BACK, engine)
    expected, store = gradient(opened(bundle, BACK), call, 0)
    assert sizes(store) == {}
    taken = sizes(gradient(programs, call, ENOUGH)[1])
    chain = bundle.chain
    assert [*taken] == [*reversed(range(chain.lowest_adapted, len(chain.blocks)))]
    for count in range(len(taken) + 1):
        most = sum([*taken.values()][:count])
        found, store = gradient(programs, call, most)
        assert found == expected
        assert sizes(store) == dict([*taken.items()][:count])


@needs_compiler
def test_what_was_saved_is_not_computed_again(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    call, programs = call_of(bundle.chain.model, 2), opened(bundle, BACK)
    run, roles = programs.blocks.run, list[tuple[int, str]]()

    def noted(number: int, role: str, *arguments: Any) -> Any:
        roles.append((number, role))
        return run(number, role, *arguments)

    monkeypatch.setattr(programs.blocks, "run", noted)
    gradient(programs, call, 0)
    assert {role for _, role in roles} == {STACK, BACK}
    roles.clear()
    _, store = gradient(programs, call, ENOUGH)
    first = bundle.chain.lowest_adapted
    assert {role for number, role in roles if number >= first} == {SAVE, BACK_SAVED}
    last = max(sizes(store))
    roles.clear()
    gradient(programs, call, sizes(store)[last])
    assert {role for number, role in roles if number == last} == {SAVE, BACK_SAVED}
    assert {role for number, role in roles if first <= number < last} == {STACK, BACK}


@needs_compiler
def test_calls_of_other_sizes_follow_each_other(bundle: Bundle) -> None:
    """Room that a longer call has written to holds a shorter one, whose answers are smaller than the room."""
    model, programs = bundle.chain.model, opened(bundle, BACK)
    calls = call_of(model, 5), call_of(model, 5, lengths=[2])
    expected = [gradient(programs, call, 0)[0] for call in calls]
    store = ActivationStore(programs.blocks, residual_bytes=ENOUGH)
    engine, memory = ChainEngine(programs.blocks, 1, store), None
    for _ in range(2):
        for call, want in zip(calls, expected, strict=True):
            assert bits(computed(engine, BACK, call)) == want
            last = store.residuals(bundle.chain.end - 1)
            whole = next(iter(last.values())).memory.base
            assert whole is not None and memory in (None, id(whole))
            memory = id(whole)


@needs_compiler
def test_a_budget_is_what_is_left_beside_all_weights(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = bundle.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size)
    for memory, left in ((max(loaded), 0), (sum(loaded), 0), (sum(loaded) + 12_345, 12_345)):
        assert opened(bundle, BACK, loaded=memory).store.residual_bytes == left
    monkeypatch.setattr(blocks_module, "available_memory", lambda: sum(loaded) + 4_000)
    store = opened(bundle, BACK).store
    assert store.residual_bytes == 1_000
    described = store.describe_residuals(2 * TOKENS, 10)
    assert "activations: 0 of " in described and "(0 of 0 MB)" in described
    # The torch engine holds room for the largest answers of each method.
    assert opened(bundle, BACK, "torch", loaded=1 << 30).store.residual_bytes == 0


@needs_compiler
def test_states_that_are_rounded_are_gone_through_again(bundle: Bundle) -> None:
    """Residuals of a forward pass aren't those of rounded checkpoints."""
    assert opened(bundle, BACK, checkpoint_dtype="float16").store.residual_bytes is None
    assert opened(bundle, BACK).store.residual_bytes is not None
    assert opened(bundle, STACK).store.residual_bytes is None


@needs_compiler
def test_a_bundle_of_an_earlier_version_computes_all_again(bundle: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    manifest = read_json(folder)
    for kind in manifest["chain"]["kinds"]:
        for role in OF_BACK:
            kind["methods"].pop(role, None)
    write_manifest(folder, manifest)
    call = call_of(bundle.chain.model, 3)
    found, store = gradient(opened(open_bundle(folder), BACK), call, ENOUGH)
    assert sizes(store) == {} and found == gradient(opened(bundle, BACK), call, ENOUGH)[0]


@needs_compiler
def test_one_question_takes_the_room_of_two(bundle: Bundle) -> None:
    """What lies behind it is written later, or is nobody's."""
    call, programs = call_of(bundle.chain.model, 1), opened(bundle, BACK)
    sequence = TokenSequence(call.sequences[0].tokens, (Target(3, 1, 1.0, 0),))
    call = replace(call, sequences=(sequence,))
    assert gradient(programs, call, ENOUGH)[0] == gradient(programs, call, 0)[0]


@needs_compiler
def test_blocks_that_save_nothing_as_experts_do_are_passed_over(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = opened(bundle, BACK).blocks
    numbers = [*ActivationStore(blocks, residual_bytes=ENOUGH).saving_blocks(2 * TOKENS, 10)]
    widths = blocks.saved_widths
    monkeypatch.setattr(blocks, "saved_widths", lambda each: {} if each == numbers[1] else widths(each))
    store = ActivationStore(blocks, residual_bytes=ENOUGH)
    assert [*store.saving_blocks(2 * TOKENS, 10)] == [numbers[0], *numbers[2:]]
