"""Checkpoints keep their values; residuals save recomputation; neither changes a bit."""

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
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.chain import Bounds
from prge.formats.signatures import BACKWARD, BACKWARD_SAVED, FORWARD, FORWARD_SAVE, RESIDUAL_ROLES
from tests.bundles import read_manifest, write_manifest
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import TOKENS, bits, call_of, computed, export_chain, opened
from tests.refusals import raises
from tests.tiers import second_tier
from tests.workshop import FolderBuilder

ENOUGH = 1 << 40
# More than a tiny chain needs, and more than its calls are split into.
MAX_BLOCKS, MAX_PARTS = 32, 64
STATES = [np.random.default_rng(n).standard_normal((1, 2, 5, 3)).astype(np.float32) for n in range(6)]


def new_store(**settings: Any) -> ActivationStore:
    """Return a store for a chain whose blocks save nothing."""
    chain = SimpleNamespace(head_start=1, lowest_adapted=1, blocks=[None], bounds=Bounds())
    blocks: Any = SimpleNamespace(chain=chain)
    return ActivationStore(blocks, **settings)


def restored(store: ActivationStore, states: list[FloatArray]) -> list[FloatArray]:
    """Return the hidden states of one part of a call as its backward pass reads them."""
    store.begin([state.size for state in states], [], 0)
    for state in states:
        store.save(0, {"hidden_states": state})
    result = []
    for _ in states:
        with store.restore(0) as arrays:
            result.insert(0, arrays["hidden_states"].copy())
    return result


@pytest.mark.parametrize("max_bytes", [None, 0, 10**6], ids=["no bound", "in a file", "below the bound"])
def test_checkpoints_keep_every_bit(tmp_path: Path, max_bytes: int | None) -> None:
    store = new_store(folder=tmp_path, checkpoint_bytes=max_bytes)
    for _ in range(2):
        for result, state in zip(restored(store, STATES), STATES, strict=True):
            assert result.dtype == np.float32 and np.array_equal(result, state)
    assert os.listdir(tmp_path) == []


def test_a_hidden_state_may_change_after_its_checkpoint_is_written() -> None:
    store, state = new_store(), STATES[0].copy()
    store.begin([state.size], [], 0)
    store.save(0, {"hidden_states": state})
    state[:] = 0
    with store.restore(0) as arrays:
        assert np.array_equal(arrays["hidden_states"], STATES[0])


def test_parts_of_a_call_have_checkpoints_of_their_own() -> None:
    store = new_store()
    store.begin([state.size for state in STATES[:4]], [], 0)
    for number, state in enumerate(STATES[:4]):
        store.save(number % 2, {"hidden_states": state})
    for number in (3, 2, 1, 0):
        with store.restore(number % 2) as arrays:
            assert np.array_equal(arrays["hidden_states"], STATES[number])


def test_float16_checkpoints_are_rounded() -> None:
    for result, state in zip(restored(new_store(precision="float16"), STATES), STATES, strict=True):
        assert result.dtype == np.float32 and np.array_equal(result, state.astype(np.float16))


def test_a_state_beyond_the_range_of_float16_is_kept_in_float32() -> None:
    state = np.array([[[[1e5, -1.0]]]], np.float32)
    assert np.array_equal(restored(new_store(precision="float16"), [state])[0], state)


@pytest.mark.parametrize(
    ("max_bytes", "residual_bytes", "is_left"),
    [(None, None, False), (None, 1000, True), (0, None, True)],
    ids=["in memory", "next to room for residuals", "in a file"],
)
def test_memory_is_released_after_a_call(
    tmp_path: Path, max_bytes: int | None, residual_bytes: int | None, is_left: bool
) -> None:
    store = new_store(folder=tmp_path, checkpoint_bytes=max_bytes, residual_bytes=residual_bytes)
    store.begin([STATES[0].size], [], 0)
    store.save(0, {"hidden_states": STATES[0]})
    with store.restore(0) as arrays:
        base: Any = arrays.pop("hidden_states").base
    room = weakref.ref(base)
    del base
    store.end()
    assert (room() is not None) == is_left
    assert all(np.array_equal(f, s) for f, s in zip(restored(store, STATES), STATES, strict=True))


def test_a_larger_call_follows_a_smaller_one(tmp_path: Path) -> None:
    store = new_store(folder=tmp_path, checkpoint_bytes=0)
    restored(store, [np.zeros((1, 1, 1, 2), np.float32)])
    assert all(np.array_equal(f, s) for f, s in zip(restored(store, STATES), STATES, strict=True))


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with raises(RunError, "storage-full", containing=os.strerror(28)) as caught:
        restored(new_store(folder=tmp_path, checkpoint_bytes=0), STATES)
    assert caught.value.remedy
    assert os.listdir(tmp_path) == []


@pytest.fixture(
    scope="module",
    params=["llama", *second_tier("llama lora", "llama 8da4w", "gpt2 8da8w", "bert", "bert lora", "gemma4")],
)
def bundle(
    request: pytest.FixtureRequest, make_chain: Callable[[str], Path], made_once: FolderBuilder
) -> Bundle:
    name, _, scheme = request.param.partition(" ")
    if not scheme.startswith("8"):
        return open_bundle(make_chain(request.param) / "bundle")
    settings: dict[str, Any] = {"quantize": scheme, "roles": [BACKWARD]}
    return open_bundle(
        made_once(f"saved {request.param}", lambda folder: export_chain(folder, name, **settings)) / "bundle"
    )


def gradient(programs: OpenEngine, call: Call, max_bytes: int) -> tuple[list[bytes], ActivationStore]:
    """Return outputs and gradient of the second of two steps with this memory for residuals."""
    store = ActivationStore(programs.blocks, residual_bytes=max_bytes)
    engine = ChainEngine(programs.blocks, 1, store)
    for _ in range(2):
        result = computed(engine, BACKWARD, call)
    return bits(result), store


def sizes(store: ActivationStore) -> dict[int, int]:
    """Return the bytes of the arrays of each saving block, the last block first."""
    result = dict[int, int]()
    for number, part in product(reversed(range(MAX_BLOCKS)), range(MAX_PARTS)):
        with suppress(IndexError):
            for residual in store.residuals(number, part).values():
                result[number] = result.get(number, 0) + residual.values.nbytes
    return result


@needs_compiler
@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("rows", [1, 3, 9])
@needs_compiler
def test_the_gradient_has_the_same_bits_whatever_is_saved(bundle: Bundle, rows: int, engine: str) -> None:
    """No block saves, then one more block at a time, from the last one down."""
    call = call_of(bundle.chain.model, rows)
    programs = opened(bundle, BACKWARD, engine)
    expected, store = gradient(opened(bundle, BACKWARD), call, 0)
    assert sizes(store) == {}
    residual_bytes = sizes(gradient(programs, call, ENOUGH)[1])
    chain = bundle.chain
    assert [*residual_bytes] == [*reversed(range(chain.lowest_adapted, len(chain.blocks)))]
    for count in range(len(residual_bytes) + 1):
        max_bytes = sum([*residual_bytes.values()][:count])
        result, store = gradient(programs, call, max_bytes)
        assert result == expected
        assert sizes(store) == dict([*residual_bytes.items()][:count])


@needs_compiler
def test_saved_residuals_are_not_computed_again(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    call, programs = call_of(bundle.chain.model, 2), opened(bundle, BACKWARD)
    run, roles = programs.blocks.run, list[tuple[int, str]]()

    def noted(number: int, role: str, *arguments: Any) -> Any:
        roles.append((number, role))
        return run(number, role, *arguments)

    monkeypatch.setattr(programs.blocks, "run", noted)
    gradient(programs, call, 0)
    assert {role for _, role in roles} == {FORWARD, BACKWARD}
    roles.clear()
    _, store = gradient(programs, call, ENOUGH)
    first = bundle.chain.lowest_adapted
    assert {role for number, role in roles if number >= first} == {FORWARD_SAVE, BACKWARD_SAVED}
    last = max(sizes(store))
    roles.clear()
    gradient(programs, call, sizes(store)[last])
    assert {role for number, role in roles if number == last} == {FORWARD_SAVE, BACKWARD_SAVED}
    assert {role for number, role in roles if first <= number < last} == {FORWARD, BACKWARD}


@needs_compiler
def test_calls_of_other_sizes_follow_each_other(bundle: Bundle) -> None:
    """Memory of a longer call is reused by a shorter one, whose outputs are smaller."""
    model, programs = bundle.chain.model, opened(bundle, BACKWARD)
    calls = call_of(model, 5), call_of(model, 5, lengths=[2])
    expected = [gradient(programs, call, 0)[0] for call in calls]
    store = ActivationStore(programs.blocks, residual_bytes=ENOUGH)
    engine, memory = ChainEngine(programs.blocks, 1, store), None
    for _ in range(2):
        for call, want in zip(calls, expected, strict=True):
            assert bits(computed(engine, BACKWARD, call)) == want
            last = store.residuals(bundle.chain.head_start - 1)
            whole = next(iter(last.values())).memory.base
            assert whole is not None and memory in (None, id(whole))
            memory = id(whole)


@needs_compiler
def test_residuals_get_the_memory_that_weights_leave(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = bundle.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size)
    for memory, left in ((max(loaded), 0), (sum(loaded), 0), (sum(loaded) + 12_345, 12_345)):
        assert opened(bundle, BACKWARD, loaded=memory).store.residual_bytes == left
    monkeypatch.setattr(blocks_module, "available_memory", lambda: sum(loaded) + 4_000)
    store = opened(bundle, BACKWARD).store
    assert store.residual_bytes == 1_000
    described = store.describe_residuals(2 * TOKENS, 10)
    assert "activations: 0 of " in described and "(0 of 0 MB)" in described
    # The torch engine holds memory for the largest outputs of each method.
    assert opened(bundle, BACKWARD, "torch", loaded=1 << 30).store.residual_bytes == 0


@needs_compiler
def test_rounded_checkpoints_force_recomputation(bundle: Bundle) -> None:
    """float16 checkpoints force recomputation."""
    assert opened(bundle, BACKWARD, checkpoint_dtype="float16").store.residual_bytes is None
    assert opened(bundle, BACKWARD).store.residual_bytes is not None
    assert opened(bundle, FORWARD).store.residual_bytes is None


@needs_compiler
def test_a_bundle_of_an_earlier_version_recomputes_everything(bundle: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    manifest = read_manifest(folder)
    for program in manifest["chain"]["programs"]:
        for role in RESIDUAL_ROLES:
            program["methods"].pop(role, None)
    write_manifest(folder, manifest)
    call = call_of(bundle.chain.model, 3)
    result, store = gradient(opened(open_bundle(folder), BACKWARD), call, ENOUGH)
    assert sizes(store) == {} and result == gradient(opened(bundle, BACKWARD), call, ENOUGH)[0]


@needs_compiler
def test_one_target_takes_the_memory_of_two(bundle: Bundle) -> None:
    """The memory after a single target is written later, or unused."""
    call, programs = call_of(bundle.chain.model, 1), opened(bundle, BACKWARD)
    sequence = TokenSequence(call.sequences[0].tokens, (Target(3, 1, 1.0, 0),))
    call = replace(call, sequences=(sequence,))
    assert gradient(programs, call, ENOUGH)[0] == gradient(programs, call, 0)[0]


@needs_compiler
def test_blocks_without_residuals_such_as_experts_are_skipped(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = opened(bundle, BACKWARD).blocks
    numbers = [*ActivationStore(blocks, residual_bytes=ENOUGH).saving_blocks(2 * TOKENS, 10)]
    widths = blocks.residual_widths
    monkeypatch.setattr(blocks, "residual_widths", lambda each: {} if each == numbers[1] else widths(each))
    store = ActivationStore(blocks, residual_bytes=ENOUGH)
    assert [*store.saving_blocks(2 * TOKENS, 10)] == [numbers[0], *numbers[2:]]
