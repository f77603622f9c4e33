"""The arithmetic of costs: sizes that follow from shapes, work that follows from rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prge.chain import ROLES, Bounds
from prge.contract import AdaptedModule, Contract
from prge.costs import (
    Layer,
    Outline,
    bytes_text,
    export_memory,
    export_seconds,
    programs_bytes,
    run_memory,
    weights_of,
    work_of,
)

# Two blocks of width 64: attention's four layers, and a gated inner layer of 128.
LAYERS = (Layer(64, 64, 8), Layer(64, 128, 4), Layer(128, 64, 2))
OUTLINE = Outline(
    width=64,
    blocks=2,
    blocks_below=0,
    heads=4,
    head_width=16,
    layers=LAYERS,
    head=Layer(64, 1000, 1),
    modules=(AdaptedModule("layers.0.q_proj", 4, 64, 64), AdaptedModule("layers.1.q_proj", 4, 64, 64)),
    table_numbers=64_000,
    other_numbers=500,
    parameters=64_000 * 2 + 8 * 4096 + 6 * 8192,
    longest=512,
)
STACK = Contract(
    kind="stack",
    readout="logprobs",
    copies=8,
    batch_size=2,
    sequence_length=16,
    positions=3,
    width=64,
    vocabulary_size=1000,
    label_tokens=(),
    modules=OUTLINE.modules,
)
TANGENT = replace(STACK, kind="tangent", copies=1, queries=4)
EXACT = replace(STACK, kind="exact", copies=1)
LAYER_NUMBERS = 8 * 64 * 64 + 6 * 64 * 128
WEIGHTS = weights_of(OUTLINE, "fp32", False, ROLES)


def test_weights_take_four_bytes_one_or_half_of_one_and_their_scales() -> None:
    numbers = LAYER_NUMBERS + 64_000
    outputs = 8 * 64 + 4 * 128 + 2 * 64 + 1000
    assert weights_of(OUTLINE, "fp32", False, ["stack"]).layers == 4 * numbers
    assert weights_of(OUTLINE, "8da8w", True, ["stack"]).layers == numbers + 4 * outputs
    int4_layers, int8_head = LAYER_NUMBERS // 2 + LAYER_NUMBERS // 32 * 2, 64_000 + 4 * 1000
    assert weights_of(OUTLINE, "8da4w", True, ["stack"]).layers == int4_layers + int8_head


def test_layers_that_groups_do_not_divide_take_a_byte_a_number() -> None:
    odd = replace(OUTLINE, layers=(Layer(48, 10, 3),), head=None)
    assert weights_of(odd, "8da4w", True, ["stack"]).layers == 3 * 10 * (48 + 4)


def test_the_way_back_has_its_weights_transposed_in_int8_at_least() -> None:
    assert weights_of(OUTLINE, "fp32", False, ["stack", "tangent"]).transposed == 0
    assert WEIGHTS.transposed == WEIGHTS.layers
    inputs = 8 * 64 + 4 * 64 + 2 * 128 + 64
    assert weights_of(OUTLINE, "8da4w", True, ROLES).transposed == LAYER_NUMBERS + 64_000 + 4 * inputs
    # Nothing goes back below the first adapter.
    upper = replace(OUTLINE, blocks_below=1, layers=(*LAYERS, Layer(64, 64, 8, below=True)))
    assert weights_of(upper, "fp32", False, ROLES).transposed == WEIGHTS.transposed


def test_the_engine_packs_sums_and_biases_beside_the_weights() -> None:
    found = weights_of(OUTLINE, "8da8w", True, ["stack"])
    outputs = 8 * 64 + 4 * 128 + 2 * 64 + 1000
    assert found.packed == found.layers + 8 * outputs
    assert found.packed_transposed == 0


def test_programs_grow_with_roles_and_with_kinds_of_blocks() -> None:
    one, three = programs_bytes(OUTLINE, ["stack"]), programs_bytes(OUTLINE, ROLES)
    assert one < three
    assert programs_bytes(replace(OUTLINE, blocks_below=1), ROLES) > three
    assert programs_bytes(replace(OUTLINE, blocks=200), ROLES) == three


def test_work_counts_the_rows_that_are_computed() -> None:
    tokens = 2 * (1 + 4) * 16
    work = work_of(OUTLINE, TANGENT)
    assert work.layers == tokens * LAYER_NUMBERS + 2 * 5 * 3 * 64_000
    assert work.answers == 2 * 5 * 3 * 1000
    # A step of the stack has 2q copies where the tangents have q and the row itself.
    assert work_of(OUTLINE, STACK).layers / work.layers == pytest.approx(8 / 5)
    assert work.operations == 2 * (work.layers + work.products)
    # An exact step computes blocks and the head forwards, and again before it goes back.
    assert work_of(OUTLINE, EXACT).layers == 2 * 16 * 3 * LAYER_NUMBERS + 3 * 2 * 3 * 64_000


def test_a_call_beyond_the_bounds_runs_in_parts() -> None:
    assert work_of(OUTLINE, STACK).methods == 2 + 2
    assert work_of(OUTLINE, EXACT).methods == 2 + 2 + 2 + 1
    bounds = Bounds.for_rows(OUTLINE.longest)
    twice = replace(STACK, copies=bounds.copies + 1, batch_size=bounds.batch + 1)
    assert work_of(OUTLINE, twice).methods == 4 * (2 + 2)


def test_what_lies_below_the_adapter_is_computed_once_an_example() -> None:
    below = tuple(replace(layer, count=layer.count // 2, below=True) for layer in LAYERS)
    above = tuple(replace(layer, count=layer.count // 2) for layer in LAYERS)
    outline = replace(OUTLINE, layers=(*below, *above), blocks_below=1)
    half = LAYER_NUMBERS // 2
    assert work_of(outline, STACK).layers == 2 * 16 * half + 16 * 16 * half + 16 * 3 * 64_000
    assert work_of(outline, STACK).products < work_of(OUTLINE, STACK).products


def test_weights_are_mapped_by_the_native_engine_and_held_by_the_other() -> None:
    native, torch = (run_memory(OUTLINE, TANGENT, WEIGHTS, ROLES, engine) for engine in ("native", "torch"))
    assert native.weights == torch.mapped == 0
    assert native.mapped == torch.weights >= WEIGHTS.packed
    assert native.total == sum(value for name, value in native.to_json().items() if name != "total_bytes")
    # Memory of the largest call for each method.
    assert torch.arena > 2 * native.arena


def test_a_bound_of_memory_bounds_what_stays_loaded() -> None:
    whole, bounded = (
        run_memory(OUTLINE, TANGENT, WEIGHTS, ROLES, "native", memory) for memory in (None, 1000)
    )
    assert whole.mapped - bounded.mapped == WEIGHTS.packed - 1000


def test_only_an_exact_run_maps_transposed_weights_and_keeps_states() -> None:
    stack, exact = (
        run_memory(OUTLINE, contract, WEIGHTS, ROLES, "native")
        for contract in (replace(STACK, copies=1), EXACT)
    )
    assert exact.mapped - stack.mapped == WEIGHTS.packed_transposed
    # Three at any time, and what entered each block.
    assert exact.states == stack.states * (3 + 2 + 1) // 3


def test_adapter_and_directions() -> None:
    memory = run_memory(OUTLINE, STACK, WEIGHTS, ROLES, "native")
    assert (memory.adapter, memory.directions) == (8 * 2 * 4 * 64 * 4, 0)
    tangent = run_memory(OUTLINE, TANGENT, WEIGHTS, ROLES, "native")
    assert (tangent.adapter, tangent.directions) == (2 * 4 * 64 * 4, 4 * 2 * 2 * (4 + 64) * 5)


def test_the_native_engine_takes_what_a_call_needs_whatever_the_bounds() -> None:
    call = replace(TANGENT, batch_size=1)
    long, short = (
        run_memory(replace(OUTLINE, longest=longest), call, WEIGHTS, ROLES, "native")
        for longest in (1024, 256)
    )
    assert long == short


def test_an_export_takes_more_with_a_larger_model_and_more_roles() -> None:
    large = replace(OUTLINE, parameters=2 * 10**8)
    assert export_memory(large, "fp32", ["stack"]) > 6 * large.parameters
    # Larger ones are compared in parts of their own.
    huge = replace(OUTLINE, parameters=10**10)
    assert export_memory(huge, "fp32", ROLES) == export_memory(OUTLINE, "fp32", ROLES)
    assert export_memory(OUTLINE, "fp32", ["stack"]) < export_memory(OUTLINE, "fp32", ROLES)
    assert export_seconds(OUTLINE, ["stack"]) < export_seconds(OUTLINE, ROLES) < export_seconds(large, ROLES)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 30, "5.00 GiB"),
        (None, "unknown"),
    ],
)
def test_bytes_for_readers(count: int | None, text: str) -> None:
    assert bytes_text(count) == text
