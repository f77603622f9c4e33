"""The arithmetic of costs: sizes that follow from shapes, work that follows from rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prge.contract import AdaptedModule, Contract
from prge.costs import (
    RUNTIME_BYTES,
    Layer,
    Outline,
    bytes_text,
    estimated_memory,
    export_memory,
    file_bytes,
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
    table_numbers=64_000,
    other_numbers=500,
    parameters=64_000 * 2 + 8 * 4096 + 6 * 8192,
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
    modules=(AdaptedModule("layers.0.q_proj", 4, 64, 64), AdaptedModule("layers.1.q_proj", 4, 64, 64)),
)
TANGENT = replace(STACK, kind="tangent", copies=1, queries=4)
LAYER_NUMBERS = 8 * 64 * 64 + 6 * 64 * 128


def test_weights_take_four_bytes_one_or_half_of_one_and_their_scales() -> None:
    numbers = LAYER_NUMBERS + 64_000
    outputs = 8 * 64 + 4 * 128 + 2 * 64 + 1000
    assert weights_of(OUTLINE, STACK, "fp32", int8_table=False).layers == 4 * numbers
    assert weights_of(OUTLINE, STACK, "8da8w", int8_table=True).layers == numbers + 4 * outputs
    int4_layers, int8_head = LAYER_NUMBERS // 2 + LAYER_NUMBERS // 32 * 2, 64_000 + 4 * 1000
    assert weights_of(OUTLINE, STACK, "8da4w", int8_table=True).layers == int4_layers + int8_head


def test_layers_that_groups_do_not_divide_take_a_byte_a_number() -> None:
    odd = replace(OUTLINE, layers=(Layer(48, 10, 3),), head=None)
    assert weights_of(odd, STACK, "8da4w", int8_table=True).layers == 3 * 10 * (48 + 4)


def test_a_verbalizer_stores_the_rows_of_its_words() -> None:
    words = replace(STACK, readout="verbalizer", label_tokens=(5, 7))
    whole, cut = (weights_of(OUTLINE, contract, "fp32", False).layers for contract in (STACK, words))
    assert whole - cut == 4 * 64 * (1000 - 2)


def test_two_methods_store_the_weights_once() -> None:
    weights = weights_of(OUTLINE, TANGENT, "fp32", False)
    alone, both = (file_bytes(OUTLINE, methods, weights) for methods in ([TANGENT], [TANGENT, STACK]))
    assert weights.stored < alone < both < 1.1 * alone


def test_work_counts_the_rows_that_are_computed() -> None:
    tokens = 2 * (1 + 4) * 16
    work = work_of(OUTLINE, TANGENT)
    assert work.layers == tokens * LAYER_NUMBERS + 2 * 5 * 3 * 64_000
    assert work.answers == 2 * 5 * 3 * 1000
    # A step of the stack has 2q copies where the tangents have q and the row itself.
    assert work_of(OUTLINE, STACK).layers / work.layers == pytest.approx(8 / 5)
    assert work.operations == 2 * (work.layers + work.products)


def test_what_lies_below_the_adapter_is_computed_once_an_example() -> None:
    below = tuple(replace(layer, count=layer.count // 2, below=True) for layer in LAYERS)
    above = tuple(replace(layer, count=layer.count // 2) for layer in LAYERS)
    outline = replace(OUTLINE, layers=(*below, *above), blocks_below=1)
    contract = replace(STACK, shared_rows=True)
    whole, trunk, step = (work_of(outline, contract, part) for part in ("whole", "trunk", "step"))
    assert trunk.layers == 2 * 16 * LAYER_NUMBERS // 2
    assert whole.layers == trunk.layers + step.layers
    assert step.layers == 16 * 16 * LAYER_NUMBERS // 2 + 16 * 3 * 64_000


def test_memory_of_a_run_is_the_sum_of_its_parts() -> None:
    memory = run_memory(STACK, "native", 1000, 100, 10)
    adapter = 8 * 2 * 4 * 64 * 4
    assert memory.total == RUNTIME_BYTES["native"] + 1000 + 100 + 10 + adapter
    assert memory.peak == memory.total
    assert run_memory(STACK, "native", None, None, None).total == RUNTIME_BYTES["native"] + adapter


def test_only_the_torch_engine_has_the_weights_twice_while_loading() -> None:
    weights = weights_of(OUTLINE, STACK, "fp32", False)
    native, torch = (estimated_memory(OUTLINE, STACK, weights, engine) for engine in ("native", "torch"))
    assert native.while_loading < native.total
    assert torch.while_loading - RUNTIME_BYTES["torch"] == (
        native.while_loading - RUNTIME_BYTES["native"] + weights.layers
    )


def test_fewer_copies_take_less_memory_and_more_calls_the_same_work() -> None:
    weights = weights_of(OUTLINE, STACK, "fp32", False)
    totals = [
        estimated_memory(OUTLINE, replace(STACK, copies=copies), weights, "native").total
        for copies in (1, 2, 4, 8)
    ]
    assert totals == sorted(totals)
    assert 8 * work_of(OUTLINE, replace(STACK, copies=1)).layers == work_of(OUTLINE, STACK).layers


def test_an_export_takes_the_model_in_float32_and_what_it_is_loaded_from() -> None:
    large = replace(OUTLINE, parameters=10**9)
    weights = weights_of(large, STACK, "8da4w", True)
    stored = 2 * 10**9
    assert export_memory(large, weights, "8da4w", stored, [STACK]) - 4 * 10**9 - stored < 10**9
    # A float program lies beside what a method is made from while it is lowered.
    assert export_memory(large, weights, "fp32", stored, [STACK]) > 2 * 4 * 10**9


def test_methods_of_an_export_share_the_weights_that_are_lowered_but_not_what_the_engine_packs() -> None:
    large = replace(OUTLINE, parameters=10**9)
    weights = weights_of(large, STACK, "fp32", False)
    one, two, three = (export_memory(large, weights, "fp32", 0, [STACK] * count) for count in (1, 2, 3))
    assert three - two == two - one > weights.layers
    assert two - one < 1.1 * weights.layers + 2 * 10**7


def test_an_export_holds_the_logits_of_a_call_while_it_verifies() -> None:
    weights = weights_of(OUTLINE, STACK, "fp32", False)
    few, many = (
        export_memory(OUTLINE, weights, "fp32", 0, [replace(STACK, positions=positions)])
        for positions in (3, 10_003)
    )
    assert many - few > 2 * 4 * STACK.rows * 10_000 * STACK.vocabulary_size


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


def test_an_exact_program_has_its_weights_twice_and_keeps_what_it_goes_back_through() -> None:
    exact = replace(STACK, kind="exact", copies=1)
    once, twice = (weights_of(OUTLINE, contract, "fp32", False) for contract in (STACK, exact))
    assert twice.layers == 2 * once.layers
    # Transposed, they are int8 beside int4 ones.
    half, more = (weights_of(OUTLINE, contract, "8da4w", True) for contract in (STACK, exact))
    inputs = 8 * 64 + 4 * 64 + 2 * 128 + 64
    assert more.layers - half.layers == LAYER_NUMBERS + 64_000 + 4 * inputs
    # Nothing goes back below the first adapter.
    upper = replace(OUTLINE, blocks_below=1, layers=(*LAYERS, Layer(64, 64, 8, below=True)))
    numbers = LAYER_NUMBERS + 64_000
    assert weights_of(upper, exact, "fp32", False).layers == 4 * (2 * numbers + 8 * 64 * 64)
    # 16 tokens of 2 rows: 4 sums and norms, 4 of attention, its weights, 2 results of 128.
    kept = 4 * 2 * 16 * (4 * 64 + 4 * 64 + 4 * 16 + 2 * 128) * 2
    memory, deeper = (estimated_memory(found, exact, twice, "native") for found in (upper, OUTLINE))
    assert deeper.arena is not None and memory.arena is not None
    assert deeper.arena - memory.arena == kept // 2
    assert work_of(OUTLINE, exact).layers == 2 * work_of(OUTLINE, replace(STACK, copies=1)).layers
