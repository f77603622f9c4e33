"""A chain of blocks answers as the whole model does, whatever a call's size, on both engines."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prge.contract import Contract

from device_runner.engines.kept_states import KeptStates
from device_runner.engines.opening import Engines
from prge.errors import EngineError
from prge.files.bundle import Bundle, open_bundle
from prge.model_spec import matrices
from tests.compilers import needs_compiler
from tests.device_runner.engines.chains import (
    Inputs,
    Whole,
    computed,
    counted_loads,
    inputs_of,
    opened,
)
from tests.tiers import rest

pytestmark = needs_compiler

# Copies, rows, queries and questions beyond the bounds of one call, which are 8, 4, 8 and 128.
STACKS = [(1, 3), (3, 2), (1, 37), (10, 5)]
TANGENTS = [(2, 3), (9, 6)]


@pytest.fixture(scope="module", params=["llama", *rest("llama lora", "bert", "bert lora", "gemma4")])
def folder(request: pytest.FixtureRequest, make_chain: Callable[[str], Path]) -> Path:
    return make_chain(request.param)


@pytest.fixture
def bundle(folder: Path) -> Bundle:
    return open_bundle(folder / "bundle")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return Whole.of(folder)


def contract_of(bundle: Bundle, kind: str, rows: int, **sizes: int) -> Contract:
    return bundle.chain.contract(kind, rows, **sizes)


def adapter_of(contract: Contract, given: Inputs, copy: int | None = None) -> dict[str, Any]:
    """The call's adapter, or that of one copy, as tensors."""
    arrays = {matrix.name: torch.from_numpy(given[matrix.name]) for matrix in matrices(contract.modules)}
    return arrays if copy is None else {name: array[copy] for name, array in arrays.items()}


def rows_of(given: Inputs, rows: slice) -> Inputs:
    names = ("tokens", "attention_mask", "positions", "targets")
    return {name: given[name][rows] for name in names if name in given}


def close(found: Any, expected: Any, tolerance: float = 2e-5) -> bool:
    return bool(np.abs(found - expected.numpy()).max() <= tolerance * max(1, float(expected.abs().max())))


def same_on_torch(bundle: Bundle, contract: Contract, given: Inputs, found: Inputs) -> None:
    on_torch = computed(opened(bundle, contract, "torch").step, given)
    assert {name: array.tobytes() for name, array in on_torch.items()} == {
        name: array.tobytes() for name, array in found.items()
    }


@pytest.mark.parametrize("same_rows", [True, False])
@pytest.mark.parametrize(("copies", "batch"), STACKS)
def test_a_stack_answers_as_the_model_with_every_copys_adapter(
    bundle: Bundle, whole: Whole, copies: int, batch: int, same_rows: bool
) -> None:
    contract = contract_of(bundle, "stack", batch, copies=copies)
    given = inputs_of(contract)
    if same_rows:
        for name in rows_of(given, slice(0)):
            given[name] = np.tile(given[name][:batch], (copies, 1))
    (found,) = (outputs := opened(bundle, contract).step.forward(given)).values()
    for copy in range(copies):
        here = slice(copy * batch, (copy + 1) * batch)
        assert close(found[here], whole.answers(rows_of(given, here), adapter_of(contract, given, copy)))
    if not same_rows:
        same_on_torch(bundle, contract, given, outputs)


@pytest.mark.parametrize(("queries", "batch"), TANGENTS)
def test_tangents_are_the_models_derivatives(bundle: Bundle, whole: Whole, queries: int, batch: int) -> None:
    contract = contract_of(bundle, "tangent", batch, queries=queries)
    given = inputs_of(contract)
    answers, tangents = (outputs := opened(bundle, contract).step.forward(given)).values()
    adapter = adapter_of(contract, given)
    assert close(answers, whole.answers(given, adapter))
    for query, row in [(0, 0), (queries - 1, batch - 1), (queries - 1, 0)]:
        directions = {
            matrix.name: torch.outer(
                torch.from_numpy(given[matrix.u][query, row]), torch.from_numpy(given[matrix.v][query, row])
            )
            for matrix in matrices(contract.modules)
        }
        one = rows_of(given, slice(row, row + 1))
        _, expected = torch.func.jvp(lambda b, one=one: whole.answers(one, b), (adapter,), (directions,))
        # The reference's own rounding in float32 is 6e-5.
        assert close(tangents[query, row], expected[0], 1e-4)
    same_on_torch(bundle, contract, given, outputs)


def test_a_slope_of_another_shape_than_the_answers_is_refused(bundle: Bundle) -> None:
    contract = contract_of(bundle, "back", 3)
    engine = opened(bundle, contract).step
    with pytest.raises(EngineError, match=r"slope of the loss has the shape \[\], the answers \[3, \d+\]"):
        engine.gradient(inputs_of(contract), lambda answers: answers.sum())
    assert computed(engine, inputs_of(contract))


def test_a_row_is_answered_alike_alone_and_among_others(bundle: Bundle) -> None:
    contract = contract_of(bundle, "stack", 7)
    given = inputs_of(contract)
    (among,) = opened(bundle, contract).step.forward(given).values()
    one = replace(contract, batch_size=1)
    engine = opened(bundle, one).step
    for row in range(7):
        alone = {**given, **rows_of(given, slice(row, row + 1))}
        (found,) = engine.forward(alone).values()
        assert np.abs(found[0] - among[row]).max() <= 1e-5 * np.abs(among).max()


def test_a_row_of_one_token(bundle: Bundle, whole: Whole) -> None:
    contract = contract_of(bundle, "stack", 2)
    given = inputs_of(contract)
    for name in {"attention_mask", "positions"} & set(given):
        given[name][:] = 0
    if contract.is_encoder:
        given["attention_mask"][:, 0] = 1
    (found,) = opened(bundle, contract).step.forward(given).values()
    assert close(found, whole.answers(given, adapter_of(contract, given, 0)))


# Memory


Sizes = dict[str, int]
KINDS: list[tuple[str, Sizes]] = [("stack", {"copies": 3}), ("tangent", {"queries": 2}), ("back", {})]


@pytest.mark.parametrize(("kind", "sizes"), KINDS, ids=[kind for kind, _ in KINDS])
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_with_room_for_one_block_the_bits_are_the_same(
    bundle: Bundle, kind: str, sizes: dict[str, int], engine: str
) -> None:
    contract = contract_of(bundle, kind, 3, **sizes)
    given = inputs_of(contract)
    sizes_of_blocks = bundle.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size)
    largest = max(sizes_of_blocks)
    want = computed(opened(bundle, contract, engine).step, given)
    for memory in (largest, 3 * largest // 2):
        programs = opened(bundle, contract, engine, loaded=memory)
        with counted_loads(programs) as loads:
            found = [computed(programs.step, given) for _ in range(3)]
        for one in found:
            assert {name: array.tobytes() for name, array in one.items()} == {
                name: array.tobytes() for name, array in want.items()
            }
        if engine == "native":
            assert len(loads) == len(set(loads))
            assert 0 < sum(sizes_of_blocks[number] for number in resident(programs)) <= memory
        else:
            assert len(loads) > len(set(loads)), "nothing was unloaded"


def resident(programs: Engines) -> set[int]:
    """Blocks whose packed weights are in this process's memory."""
    gc.collect()  # engines of before have them too
    blocks: Any = programs.step._blocks  # type: ignore[attr-defined]
    numbers = {str(file.packed): number for number, file in blocks._files.items()}
    found, path = set[int](), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            path = words[-1]
        elif words[0] == "Rss:" and path in numbers and int(words[1]):
            found.add(numbers[path])
    return found


def test_without_a_bound_every_method_is_loaded_once(bundle: Bundle) -> None:
    contract = contract_of(bundle, "back", 9)
    programs = opened(bundle, contract)
    with counted_loads(programs) as loads:
        for _ in range(3):
            computed(programs.step, inputs_of(contract))
    assert len(loads) == len(set(loads))


def test_a_bound_below_the_largest_block_says_what_would_do(bundle: Bundle) -> None:
    with pytest.raises(EngineError, match=r"1000 bytes of weights may, the largest block has \d+\n  allow"):
        opened(bundle, bundle.chain.scoring, loaded=1000)


@pytest.mark.parametrize(("kind", "sizes"), KINDS, ids=[kind for kind, _ in KINDS])
def test_many_calls_take_no_more_buffers_than_the_first(
    bundle: Bundle, kind: str, sizes: dict[str, int]
) -> None:
    contract = contract_of(bundle, kind, 9, **sizes)
    programs = opened(bundle, contract)
    blocks: Any = programs.step._blocks  # type: ignore[attr-defined]
    given, counts = inputs_of(contract), []
    for _ in range(200 if kind == "stack" else 20):
        computed(programs.step, given)
        spare = [id(array) for arrays in blocks._spare.values() for array in arrays]
        assert len(spare) == len(set(spare))
        counts.append(len(spare))
    assert counts[0] == counts[-1] > 0


def test_kept_states_in_a_file_change_no_bit_and_in_float16_little(bundle: Bundle, tmp_path: Path) -> None:
    contract = contract_of(bundle, "back", 9)
    given = inputs_of(contract)
    expected = computed(opened(bundle, contract).step, given)
    in_file, half = KeptStates("float32", tmp_path, 0), KeptStates("float16")
    in_a_file = computed(opened(bundle, contract, kept=in_file).step, given)
    rounded = computed(opened(bundle, contract, kept=half).step, given)
    assert all(np.array_equal(in_a_file[name], array) for name, array in expected.items())
    assert np.array_equal(rounded[contract.answer], expected[contract.answer])
    names = [name for name in expected if name != contract.answer]
    exact, approximate = (
        np.concatenate([each[name].ravel() for name in names]) for each in (expected, rounded)
    )
    assert 0 < np.linalg.norm(approximate - exact) < 5e-3 * np.linalg.norm(exact)


def test_a_short_call_follows_one_of_exactly_the_bounds(bundle: Bundle) -> None:
    bounds = bundle.chain.bounds
    contract = contract_of(bundle, "back", bounds.batch)
    assert contract.sequence_length == bounds.tokens
    engine = opened(bundle, contract).step
    short = inputs_of(contract, seed=1)
    if contract.is_encoder:
        short["attention_mask"][:, 5:] = 0
    else:
        short["positions"] %= 5
    expected = computed(engine, short)
    for _ in range(2):
        computed(engine, inputs_of(contract))
        found = computed(engine, short)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_answers_are_not_changed_by_later_calls(bundle: Bundle) -> None:
    contract = contract_of(bundle, "back", 5)
    engine = opened(bundle, contract).step
    first = computed(engine, inputs_of(contract))
    before = {name: array.tobytes() for name, array in first.items()}
    computed(engine, inputs_of(contract, seed=1))
    assert {name: array.tobytes() for name, array in first.items()} == before


def test_the_adapter_that_an_answer_is_of_is_the_calls(bundle: Bundle) -> None:
    """Buffers are filled anew between calls."""
    contract = contract_of(bundle, "stack", 2)
    engine, given = opened(bundle, contract).step, inputs_of(contract)
    (before,) = computed(engine, given).values()
    for name in given:
        if name.startswith("lora_b."):
            given[name] *= 2
    (after,) = computed(engine, given).values()
    assert np.abs(after - before).max() > 1e-3


def test_a_failure_in_a_forward_is_told_and_the_engine_stays_usable(bundle: Bundle) -> None:
    contract = contract_of(bundle, "stack", 2)
    engine, given = opened(bundle, contract).step, inputs_of(contract)
    want = [array.tobytes() for array in computed(engine, given).values()]
    blocks: Any = engine._blocks  # type: ignore[attr-defined]
    method = blocks.method(1, "stack")
    run, method.run = method.run, lambda inputs, outputs: run(inputs[:-1], outputs)
    with pytest.raises(EngineError, match="the engine failed in a forward: the method takes"):
        computed(engine, given)
    method.run = run
    assert [array.tobytes() for array in computed(engine, given).values()] == want


def test_another_number_of_threads_is_refused_while_engines_live(bundle: Bundle) -> None:
    from device_runner.engines.opening import open_engines

    programs = open_engines(bundle, engine="native")
    with pytest.raises(EngineError, match="this one asks for 7"):
        open_engines(bundle, threads=7, engine="native")
    with pytest.raises(EngineError, match="threads is 0, must be at least 1"):
        open_engines(bundle, threads=0, engine="native")
    assert programs.threads >= 1


def test_with_little_memory_the_next_block_is_read_while_one_computes(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = contract_of(bundle, "back", 2)
    largest = max(bundle.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size))
    engine = opened(bundle, contract, loaded=largest).step
    blocks: Any = engine._blocks  # type: ignore[attr-defined]
    given = inputs_of(contract)
    computed(engine, given)
    advised: list[int] = []
    order = [
        (file.stat().st_dev, file.stat().st_ino) for file in (each.packed for each in blocks._files.values())
    ]

    def advise(descriptor: int, *_: int) -> None:
        facts = os.fstat(descriptor)
        advised.append(order.index((facts.st_dev, facts.st_ino)))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    computed(engine, given)
    last = len(order) - 1
    # Forward to the last block, and back from it.
    assert last in advised
    assert (
        advised
        == sorted(advised[: advised.index(last) + 1]) + sorted(advised[advised.index(last) + 1 :])[::-1]
    )
