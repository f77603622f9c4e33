"""The arithmetic of costs: sizes that follow from shapes, work that follows from rows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from prge.errors import BundleError
from prge.files.signatures import ROLES
from prge.learning.costs import (
    Layer,
    Outline,
    StepShape,
    bytes_text,
    export_memory,
    export_seconds,
    memory_table,
    memory_text,
    programs_bytes,
    run_memory,
    shape_of,
    weights_of,
)
from prge.model_spec import AdaptedModule
from tests.bundles import make_small_chain, make_spec
from tests.refusals import raises
from tests.rows import completion, long_choice

# Two blocks of width 64: attention's four layers, and a gated inner layer of 128.
LAYERS = (Layer(64, 64, 8), Layer(64, 128, 4), Layer(128, 64, 2))
OUTLINE = Outline(
    width=64,
    blocks=2,
    blocks_below=0,
    heads=4,
    head_width=16,
    key_width=16,
    gelu=False,
    layers=LAYERS,
    head=Layer(64, 1000, 1),
    modules=(AdaptedModule("layers.0.q_proj", 4, 64, 64), AdaptedModule("layers.1.q_proj", 4, 64, 64)),
    table_numbers=64_000,
    other_numbers=500,
    parameters=64_000 * 2 + 8 * 4096 + 6 * 8192,
    longest=512,
)
STACK = StepShape("stack", sequences=2, tokens=16, targets=3, vocabulary_size=1000, copies=8)
TANGENT = replace(STACK, role="tangent", copies=1, queries=4)
EXACT = replace(STACK, role="back", copies=1)
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


def test_weights_are_mapped_by_the_native_engine_and_held_by_the_other() -> None:
    native, torch = (run_memory(OUTLINE, TANGENT, WEIGHTS, ROLES, engine) for engine in ("native", "torch"))
    assert native.weights == torch.mapped == 0
    assert native.mapped == torch.weights >= WEIGHTS.packed
    sums = ("total_bytes", "anonymous_bytes")
    assert native.total == sum(value for name, value in native.to_json().items() if name not in sums)
    # Memory of the largest call for each method.
    assert torch.arena > 2 * native.arena


def test_a_bound_of_memory_bounds_what_stays_loaded() -> None:
    whole, bounded = (
        run_memory(OUTLINE, TANGENT, WEIGHTS, ROLES, "native", memory) for memory in (None, 1000)
    )
    # The bound counts whole files, of which a run maps the part that its roles need.
    share = 1000 / (WEIGHTS.layers + WEIGHTS.transposed)
    assert whole.mapped - bounded.mapped == WEIGHTS.packed - round(share * WEIGHTS.packed)
    assert whole.anonymous == bounded.anonymous < bounded.total


def test_states_of_an_exact_step_above_the_bound_lie_in_a_file() -> None:
    held, filed = (run_memory(OUTLINE, EXACT, WEIGHTS, ROLES, "native", bound) for bound in (30_000, 20_000))
    kept = 3 * 4 * 2 * 16 * 64
    assert 20_000 < kept < 30_000 and held.states - filed.states == kept
    assert held.total - filed.total == held.mapped + kept - filed.mapped


def test_an_exact_step_saves_answers_of_layers_in_what_weights_leave() -> None:
    """Of 2 rows of 16 tokens: of the head at 3 positions, and of each adapter's small product."""
    outputs = 8 * 64 + 4 * 128 + 2 * 64
    whole = 4 * 2 * (16 * (outputs + 2 * 4) + 3 * 1000)
    weights = WEIGHTS.layers + WEIGHTS.transposed
    bounds = (None, weights + 10 * whole, weights + 100, weights, 1000)
    found = [run_memory(OUTLINE, EXACT, WEIGHTS, ROLES, "native", bound) for bound in bounds]
    assert [memory.saved for memory in found] == [whole, whole, 100, 0, 0]
    assert found[0].anonymous - found[3].anonymous == whole + found[0].methods - found[3].methods
    # The torch engine saves nothing, and no other estimator does.
    assert run_memory(OUTLINE, EXACT, WEIGHTS, ROLES, "torch").saved == 0
    assert run_memory(OUTLINE, TANGENT, WEIGHTS, ROLES, "native").saved == 0
    below = replace(OUTLINE, layers=tuple(replace(layer, below=True) for layer in LAYERS))
    assert run_memory(below, EXACT, WEIGHTS, ROLES, "native").saved == 4 * 2 * (16 * 2 * 4 + 3 * 1000)


def test_an_arena_holds_a_block_and_the_head_in_part_at_the_same_place() -> None:
    memory = run_memory(OUTLINE, TANGENT, WEIGHTS, ROLES, "native")
    block = 4 * 2 * 16 * (5 * (3 * 64 + 5 * 16 // 2) + 3 * 4 * 4 * 16)
    head = 4 * 6 * 1000 * 2 * 5
    assert memory.arena == max(block, head) + min(block, head) // 2
    without = run_memory(replace(OUTLINE, head=None), TANGENT, WEIGHTS, ROLES, "native")
    assert without.arena == block


def test_a_workspace_is_that_of_the_largest_delegate() -> None:
    block = run_memory(OUTLINE, STACK, WEIGHTS, ROLES, "native").workspace
    assert block == 4 * 8 * 2 * 16 * 3 * 128
    tangent, gelu = (
        run_memory(outline, TANGENT, WEIGHTS, ROLES, "native").workspace
        for outline in (OUTLINE, replace(OUTLINE, gelu=True))
    )
    assert (tangent, gelu) == tuple(4 * 2 * 16 * (3 + 4 * values) * 128 for values in (2, 5))
    # The head, asked at all 48 positions.
    many = replace(STACK, sequences=1, copies=1, targets=48)
    assert run_memory(OUTLINE, many, WEIGHTS, ROLES, "native").workspace == 4 * 48 * 1000


def test_the_least_bound_is_the_largest_file_of_a_block() -> None:
    assert WEIGHTS.largest == 2 * 4 * 64_000
    assert weights_of(replace(OUTLINE, head=None), "fp32", False, ["stack"]).largest == 4 * LAYER_NUMBERS // 2
    many = replace(OUTLINE, layers=tuple(replace(layer, count=9 * layer.count) for layer in LAYERS))
    assert weights_of(many, "fp32", False, ROLES).largest == 2 * 9 * 4 * LAYER_NUMBERS // 2


def test_memory_of_a_row_in_pieces_grows_with_its_length() -> None:
    outline = replace(OUTLINE, longest=8192)
    weights = weights_of(outline, "fp32", True, ROLES)
    taken = {}
    for length in (256, 512, 1024, 2048, 4096, 8192):
        shape = replace(EXACT, sequences=1, tokens=length, targets=1)
        taken[length] = run_memory(outline, shape, weights, ROLES, "native", weights.largest).anonymous
    # Half of an attention's scores is what a whole row's are, once it is longer than a piece.
    assert taken[8192] - taken[4096] < 2.5 * (taken[4096] - taken[2048])
    whole = replace(OUTLINE, longest=512)
    shape = replace(shape, tokens=512)
    assert taken[512] < run_memory(whole, shape, weights, ROLES, "native", weights.largest).anonymous


def test_a_table_of_memory_has_all_estimators_and_both_bounds() -> None:
    shapes = dict(zip(("exact", "tangent", "antithetic"), (EXACT, TANGENT, STACK), strict=True))
    rows = memory_table(OUTLINE, shapes, WEIGHTS, ROLES)
    assert [(row["estimator"], row["loaded_bytes"]) for row in rows] == [
        (name, bound) for name in ("exact", "tangent", "antithetic") for bound in (None, WEIGHTS.largest)
    ]
    assert all(row["anonymous_bytes"] < row["resident_bytes"] for row in rows)
    lines = [*memory_text(rows)]
    assert len(lines) == 7 and "--memory" in lines[0] and "everything" in lines[1]


def test_a_manifest_keeps_the_outline() -> None:
    chain = make_small_chain()
    outline = replace(OUTLINE, modules=chain.modules, longest=chain.bounds.tokens)
    block = json.loads(json.dumps(outline.to_json()))
    assert Outline.from_json(block, chain) == outline
    for wrong in ({}, None, {**block, "width": 0}, {**block, "heads": "4"}, {**block, "head": {}}):
        with raises(BundleError, "outline-unreadable"):
            Outline.from_json(wrong, chain)


def test_only_an_exact_run_maps_transposed_weights_and_keeps_states() -> None:
    stack, exact = (
        run_memory(OUTLINE, shape, WEIGHTS, ROLES, "native") for shape in (replace(STACK, copies=1), EXACT)
    )
    assert exact.mapped - stack.mapped == WEIGHTS.packed_transposed
    # Three at any time, and what entered each block.
    assert exact.states == stack.states * (3 + 2 + 1) // 3


def test_adapter_and_directions() -> None:
    memory = run_memory(OUTLINE, STACK, WEIGHTS, ROLES, "native")
    assert (memory.adapter, memory.directions) == (8 * 2 * 4 * 64 * 4, 0)
    tangent = run_memory(OUTLINE, TANGENT, WEIGHTS, ROLES, "native")
    assert (tangent.adapter, tangent.directions) == (2 * 4 * 64 * 4, 4 * 2 * 2 * (4 + 64) * 5)
    # Those of a whole step, however few of its sequences are computed at once.
    large = replace(TANGENT, sequences=1000)
    assert large.together < 1000
    taken = run_memory(OUTLINE, large, WEIGHTS, ROLES, "native")
    assert taken.directions == 500 * tangent.directions


def test_the_native_engine_takes_what_a_call_needs_whatever_the_bounds() -> None:
    call = replace(TANGENT, sequences=1)
    long, short = (
        run_memory(replace(OUTLINE, longest=longest), call, WEIGHTS, ROLES, "native")
        for longest in (1024, 256)
    )
    assert long == short


def test_an_export_takes_more_with_a_larger_table_and_more_roles() -> None:
    large = replace(OUTLINE, parameters=10**10)
    # No part of it is in memory but the table of embeddings and a block.
    assert export_memory(large, "fp32", ROLES) == export_memory(OUTLINE, "fp32", ROLES)
    tabled = replace(OUTLINE, table_numbers=OUTLINE.table_numbers + 10**8)
    assert export_memory(tabled, "fp32", ROLES) >= export_memory(OUTLINE, "fp32", ROLES) + 16 * 10**8
    assert export_memory(OUTLINE, "fp32", ["stack"]) < export_memory(OUTLINE, "fp32", ROLES)
    assert export_seconds(OUTLINE, ["stack"]) < export_seconds(OUTLINE, ROLES) < export_seconds(large, ROLES)


@pytest.mark.parametrize(
    ("changes", "tokens", "rows"),
    [
        ({"role": "back", "tokens": 100}, 512, 6),
        ({"role": "back", "tokens": 600}, 600, 1),
        ({"role": "back", "sequences": 3}, 48, 3),
        ({"role": "back", "tokens": 100, "of_example": 4}, 512, 6),
        # The candidates of an example are computed together.
        ({"role": "back", "tokens": 100, "of_example": 9}, 900, 9),
        # A loss that compares examples has them all at once.
        ({"role": "back", "tokens": 100, "is_separate": False}, 100_000, 1000),
        ({"role": "stack", "tokens": 100}, 512, 6),
        ({"role": "stack", "tokens": 100, "copies": 8}, 1024, 88),
        ({"role": "stack", "tokens": 2000, "copies": 8}, 2000, 8),
        ({"role": "tangent", "tokens": 100, "queries": 4}, 1638, 17),
    ],
)
def test_so_many_tokens_have_their_states_at_once(changes: dict[str, Any], tokens: int, rows: int) -> None:
    """Microbatches of 512 tokens, and 8,192 states of tokens with every copy or direction."""
    fields = {"sequences": 1000, "tokens": 16, "targets": 3, "vocabulary_size": 64}
    shape = StepShape(**{**fields, **changes})
    assert (shape.tokens_together, shape.states, shape.rows) == (tokens, shape.copies * tokens, rows)


def test_a_shape_has_the_largest_sizes_of_the_rows() -> None:
    examples = [completion(1, [1, 2, 3, 4, 5], 4), long_choice(2, [1], [[2], [3, 4, 5]], 0)]
    spec = make_spec()
    found = shape_of("tangent", examples, 6, spec, queries=2)
    assert found == StepShape("tangent", 6, 5, 3, spec.vocabulary_size, queries=2)
    # Without rows they are the model's.
    assert shape_of("stack", [], 6, spec) == StepShape("stack", 6, 16, 15, spec.vocabulary_size)


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
