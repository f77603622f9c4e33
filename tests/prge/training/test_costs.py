"""Estimates of sizes and memory from shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from prge.errors import BundleError
from prge.formats.signatures import ROLES
from prge.model_spec import AdaptedModule
from prge.training.costs import (
    LayerShape,
    ModelSizes,
    RunMemory,
    StepShape,
    estimate_export_memory,
    estimate_export_seconds,
    estimate_program_bytes,
    estimate_run_memory,
    estimate_weight_bytes,
    format_bytes,
    format_memory_table,
    memory_table,
    step_shape,
)
from tests.bundles import make_small_chain, make_spec
from tests.refusals import raises
from tests.rows import completion, long_choice

# Two blocks of width 64: attention's four layers, and a gated inner layer of 128.
LAYERS = (LayerShape(64, 64, 8), LayerShape(64, 128, 4), LayerShape(128, 64, 2))
OUTLINE = ModelSizes(
    width=64,
    blocks=2,
    blocks_below=0,
    heads=4,
    head_width=16,
    key_width=16,
    gelu=False,
    layers=LAYERS,
    head=LayerShape(64, 1000, 1),
    modules=(AdaptedModule("layers.0.q_proj", 4, 64, 64), AdaptedModule("layers.1.q_proj", 4, 64, 64)),
    table_numbers=64_000,
    other_numbers=500,
    parameters=64_000 * 2 + 8 * 4096 + 6 * 8192,
    longest=512,
)
FORWARD = StepShape("forward", sequences=2, tokens=16, targets=3, vocabulary_size=1000, copies=8)
JVP = replace(FORWARD, role="jvp", copies=1, queries=4)
EXACT = replace(FORWARD, role="backward", copies=1)
LAYER_NUMBERS = 8 * 64 * 64 + 6 * 64 * 128
WEIGHTS = estimate_weight_bytes(OUTLINE, "fp32", False, ROLES)


def test_weights_take_four_bytes_one_or_half_of_one_and_their_scales() -> None:
    numbers = LAYER_NUMBERS + 64_000
    outputs = 8 * 64 + 4 * 128 + 2 * 64 + 1000
    assert estimate_weight_bytes(OUTLINE, "fp32", False, ["forward"]).layers == 4 * numbers
    assert estimate_weight_bytes(OUTLINE, "8da8w", True, ["forward"]).layers == numbers + 4 * outputs
    int4_layers, int8_head = LAYER_NUMBERS // 2 + LAYER_NUMBERS // 32 * 2, 64_000 + 4 * 1000
    assert estimate_weight_bytes(OUTLINE, "8da4w", True, ["forward"]).layers == int4_layers + int8_head


def test_layers_that_cannot_be_grouped_take_a_byte_per_weight() -> None:
    odd = replace(OUTLINE, layers=(LayerShape(48, 10, 3),), head=None)
    assert estimate_weight_bytes(odd, "8da4w", True, ["forward"]).layers == 3 * 10 * (48 + 4)


def test_the_backward_pass_has_transposed_weights_in_at_least_int8() -> None:
    assert estimate_weight_bytes(OUTLINE, "fp32", False, ["forward", "jvp"]).transposed == 0
    assert WEIGHTS.transposed == WEIGHTS.layers
    inputs = 8 * 64 + 4 * 64 + 2 * 128 + 64
    assert (
        estimate_weight_bytes(OUTLINE, "8da4w", True, ROLES).transposed == LAYER_NUMBERS + 64_000 + 4 * inputs
    )
    # Below the first adapter, there is no backward pass.
    upper = replace(OUTLINE, blocks_below=1, layers=(*LAYERS, LayerShape(64, 64, 8, below=True)))
    assert estimate_weight_bytes(upper, "fp32", False, ROLES).transposed == WEIGHTS.transposed


def test_the_engine_packs_sums_and_biases_with_the_weights() -> None:
    result = estimate_weight_bytes(OUTLINE, "8da8w", True, ["forward"])
    outputs = 8 * 64 + 4 * 128 + 2 * 64 + 1000
    assert result.packed == result.layers + 8 * outputs
    assert result.packed_transposed == 0


def test_programs_grow_with_roles_and_with_block_types() -> None:
    one, three = estimate_program_bytes(OUTLINE, ["forward"]), estimate_program_bytes(OUTLINE, ROLES)
    assert one < three
    assert estimate_program_bytes(replace(OUTLINE, blocks_below=1), ROLES) > three
    assert estimate_program_bytes(replace(OUTLINE, blocks=200), ROLES) == three


def test_weights_are_mapped_by_the_native_engine_and_held_by_the_other() -> None:
    native, torch = (
        estimate_run_memory(OUTLINE, JVP, WEIGHTS, ROLES, engine) for engine in ("native", "torch")
    )
    assert native.weights == torch.mapped == 0
    assert native.mapped == torch.weights >= WEIGHTS.packed
    sums = ("total_bytes", "anonymous_bytes")
    assert native.total == sum(value for name, value in native.to_json().items() if name not in sums)
    # The torch engine has memory for the largest call of each method.
    assert torch.arena > 2 * native.arena


def test_a_memory_limit_bounds_the_loaded_weights() -> None:
    whole, bounded = (
        estimate_run_memory(OUTLINE, JVP, WEIGHTS, ROLES, "native", memory) for memory in (None, 1000)
    )
    # The limit counts whole files, of which a run maps the parts that its roles need.
    share = 1000 / (WEIGHTS.layers + WEIGHTS.transposed)
    assert whole.mapped - bounded.mapped == WEIGHTS.packed - round(share * WEIGHTS.packed)
    assert whole.anonymous == bounded.anonymous < bounded.total


def test_activation_checkpoints_above_the_limit_are_stored_in_a_file() -> None:
    held, filed = (
        estimate_run_memory(OUTLINE, EXACT, WEIGHTS, ROLES, "native", bound) for bound in (30_000, 20_000)
    )
    kept = 3 * 4 * 2 * 16 * 64
    assert 20_000 < kept < 30_000 and held.states - filed.states == kept
    assert held.total - filed.total == held.mapped + kept - filed.mapped


def test_an_exact_step_saves_residuals_in_the_memory_that_weights_leave() -> None:
    """There are 2 rows of 16 tokens: the head saves 3 positions, and each adapter a small product."""
    outputs = 8 * 64 + 4 * 128 + 2 * 64
    whole = 4 * 2 * (16 * (outputs + 2 * 4) + 3 * 1000)
    weights = WEIGHTS.layers + WEIGHTS.transposed
    bounds = (None, weights + 10 * whole, weights + 100, weights, 1000)
    result = [estimate_run_memory(OUTLINE, EXACT, WEIGHTS, ROLES, "native", bound) for bound in bounds]
    assert [memory.saved for memory in result] == [whole, whole, 100, 0, 0]
    assert result[0].anonymous - result[3].anonymous == whole + result[0].methods - result[3].methods
    # The torch engine and other estimators have no residuals.
    assert estimate_run_memory(OUTLINE, EXACT, WEIGHTS, ROLES, "torch").saved == 0
    assert estimate_run_memory(OUTLINE, JVP, WEIGHTS, ROLES, "native").saved == 0
    below = replace(OUTLINE, layers=tuple(replace(layer, below=True) for layer in LAYERS))
    assert estimate_run_memory(below, EXACT, WEIGHTS, ROLES, "native").saved == 4 * 2 * (
        16 * 2 * 4 + 3 * 1000
    )


def test_the_arenas_of_a_block_and_the_head_overlap_in_part() -> None:
    memory = estimate_run_memory(OUTLINE, JVP, WEIGHTS, ROLES, "native")
    block = 4 * 2 * 16 * (5 * (3 * 64 + 5 * 16 // 2) + 3 * 4 * 4 * 16)
    head = 4 * 6 * 1000 * 2 * 5
    assert memory.arena == max(block, head) + min(block, head) // 2
    without = estimate_run_memory(replace(OUTLINE, head=None), JVP, WEIGHTS, ROLES, "native")
    assert without.arena == block


def test_a_tokenizer_counts_if_it_stays_loaded_or_takes_more_than_steps() -> None:
    def memory(vocabulary: int, keeps: bool) -> RunMemory:
        shape = replace(JVP, vocabulary_size=vocabulary)
        return estimate_run_memory(
            OUTLINE, shape, WEIGHTS, ROLES, "native", WEIGHTS.largest, keeps_tokenizer=keeps
        )

    assert memory(1_000, False).tokenizer == 0 < memory(1_000, True).tokenizer
    freed, kept = memory(10**6, False), memory(10**6, True)
    assert 0 < freed.tokenizer < kept.tokenizer
    assert freed.anonymous == freed.runtime + kept.tokenizer


def test_a_workspace_is_that_of_the_largest_delegate() -> None:
    block = estimate_run_memory(OUTLINE, FORWARD, WEIGHTS, ROLES, "native").workspace
    assert block == 4 * 8 * 2 * 16 * 3 * 128
    tangent, gelu = (
        estimate_run_memory(outline, JVP, WEIGHTS, ROLES, "native").workspace
        for outline in (OUTLINE, replace(OUTLINE, gelu=True))
    )
    assert (tangent, gelu) == tuple(4 * 2 * 16 * (3 + 4 * values) * 128 for values in (2, 5))
    # The head, with all 48 positions as targets.
    many = replace(FORWARD, sequences=1, copies=1, targets=48)
    assert estimate_run_memory(OUTLINE, many, WEIGHTS, ROLES, "native").workspace == 4 * 48 * 1000


def test_the_smallest_limit_is_the_largest_file_of_a_block() -> None:
    assert WEIGHTS.largest == 2 * 4 * 64_000
    assert (
        estimate_weight_bytes(replace(OUTLINE, head=None), "fp32", False, ["forward"]).largest
        == 4 * LAYER_NUMBERS // 2
    )
    many = replace(OUTLINE, layers=tuple(replace(layer, count=9 * layer.count) for layer in LAYERS))
    assert estimate_weight_bytes(many, "fp32", False, ROLES).largest == 2 * 9 * 4 * LAYER_NUMBERS // 2


def test_memory_of_a_row_in_chunks_grows_with_its_length() -> None:
    outline = replace(OUTLINE, longest=8192)
    weights = estimate_weight_bytes(outline, "fp32", True, ROLES)
    needed = {}
    for length in (256, 512, 1024, 2048, 4096, 8192):
        shape = replace(EXACT, sequences=1, tokens=length, targets=1)
        needed[length] = estimate_run_memory(
            outline, shape, weights, ROLES, "native", weights.largest
        ).anonymous
    # In chunks, the scores of attention grow in proportion to the length of the row.
    assert needed[8192] - needed[4096] < 2.5 * (needed[4096] - needed[2048])
    whole = replace(OUTLINE, longest=512)
    shape = replace(shape, tokens=512)
    assert (
        needed[512] < estimate_run_memory(whole, shape, weights, ROLES, "native", weights.largest).anonymous
    )


def test_the_memory_table_has_all_estimators_and_both_limits() -> None:
    shapes = dict(zip(("exact", "tangent", "antithetic"), (EXACT, JVP, FORWARD), strict=True))
    rows = memory_table(OUTLINE, shapes, WEIGHTS, ROLES)
    assert [(row["estimator"], row["loaded_bytes"]) for row in rows] == [
        (name, bound) for name in ("exact", "tangent", "antithetic") for bound in (None, WEIGHTS.largest)
    ]
    assert all(row["anonymous_bytes"] < row["resident_bytes"] for row in rows)
    lines = [*format_memory_table(rows)]
    assert len(lines) == 7 and "--memory" in lines[0] and "everything" in lines[1]


def test_a_manifest_stores_the_outline() -> None:
    chain = make_small_chain()
    outline = replace(OUTLINE, modules=chain.modules, longest=chain.bounds.tokens)
    block = json.loads(json.dumps(outline.to_json()))
    assert ModelSizes.from_json(block, chain) == outline
    for wrong in ({}, None, {**block, "width": 0}, {**block, "heads": "4"}, {**block, "head": {}}):
        with raises(BundleError, "outline-unreadable"):
            ModelSizes.from_json(wrong, chain)


def test_only_an_exact_run_maps_transposed_weights_and_has_activation_checkpoints() -> None:
    forward, exact = (
        estimate_run_memory(OUTLINE, shape, WEIGHTS, ROLES, "native")
        for shape in (replace(FORWARD, copies=1), EXACT)
    )
    assert exact.mapped - forward.mapped == WEIGHTS.packed_transposed
    # Three hidden states at any time, and the checkpoint of each block.
    assert exact.states == forward.states * (3 + 2 + 1) // 3


def test_adapter_and_directions() -> None:
    memory = estimate_run_memory(OUTLINE, FORWARD, WEIGHTS, ROLES, "native")
    assert (memory.adapter, memory.directions) == (8 * 2 * 4 * 64 * 4, 0)
    tangent = estimate_run_memory(OUTLINE, JVP, WEIGHTS, ROLES, "native")
    assert (tangent.adapter, tangent.directions) == (2 * 4 * 64 * 4, 4 * 2 * 2 * (4 + 64) * 5)
    # Directions of a whole step are in memory, however few of its sequences are computed at once.
    large = replace(JVP, sequences=1000)
    assert large.sequences_at_once < 1000
    memory_of_step = estimate_run_memory(OUTLINE, large, WEIGHTS, ROLES, "native")
    assert memory_of_step.directions == 500 * tangent.directions


def test_the_native_engine_needs_memory_for_the_call_whatever_the_bounds() -> None:
    call = replace(JVP, sequences=1)
    long, short = (
        estimate_run_memory(replace(OUTLINE, longest=longest), call, WEIGHTS, ROLES, "native")
        for longest in (1024, 256)
    )
    assert long == short


def test_an_export_takes_more_with_a_larger_table_and_more_roles() -> None:
    large = replace(OUTLINE, parameters=10**10)
    # Of the model only the embedding table and one block are in memory.
    assert estimate_export_memory(large, "fp32", ROLES) == estimate_export_memory(OUTLINE, "fp32", ROLES)
    tabled = replace(OUTLINE, table_numbers=OUTLINE.table_numbers + 10**8)
    assert (
        estimate_export_memory(tabled, "fp32", ROLES)
        >= estimate_export_memory(OUTLINE, "fp32", ROLES) + 16 * 10**8
    )
    assert estimate_export_memory(OUTLINE, "fp32", ["forward"]) < estimate_export_memory(
        OUTLINE, "fp32", ROLES
    )
    assert (
        estimate_export_seconds(OUTLINE, ["forward"])
        < estimate_export_seconds(OUTLINE, ROLES)
        < estimate_export_seconds(large, ROLES)
    )


@pytest.mark.parametrize(
    ("changes", "tokens", "rows"),
    [
        ({"role": "backward", "tokens": 100}, 512, 6),
        ({"role": "backward", "tokens": 600}, 600, 1),
        ({"role": "backward", "sequences": 3}, 48, 3),
        ({"role": "backward", "tokens": 100, "sequences_per_example": 4}, 512, 6),
        # The candidates of an example are computed together.
        ({"role": "backward", "tokens": 100, "sequences_per_example": 9}, 900, 9),
        # A loss that compares examples has them all at once.
        ({"role": "backward", "tokens": 100, "is_separable": False}, 100_000, 1000),
        ({"role": "forward", "tokens": 100}, 512, 6),
        ({"role": "forward", "tokens": 100, "copies": 8}, 1024, 88),
        ({"role": "forward", "tokens": 2000, "copies": 8}, 2000, 8),
        ({"role": "jvp", "tokens": 100, "queries": 4}, 1638, 17),
    ],
)
def test_tokens_whose_hidden_states_are_held_at_once(changes: dict[str, Any], tokens: int, rows: int) -> None:
    """Microbatches have 512 tokens, and all copies or directions together hold 8,192 hidden states."""
    fields = {"sequences": 1000, "tokens": 16, "targets": 3, "vocabulary_size": 64}
    shape = StepShape(**{**fields, **changes})
    assert (shape.tokens_at_once, shape.states, shape.rows) == (tokens, shape.copies * tokens, rows)


def test_a_shape_has_the_largest_sizes_of_the_rows() -> None:
    examples = [completion(1, [1, 2, 3, 4, 5], 4), long_choice(2, [1], [[2], [3, 4, 5]], 0)]
    spec = make_spec()
    result = step_shape("jvp", examples, 6, spec, queries=2)
    assert result == StepShape("jvp", 6, 5, 3, spec.vocabulary_size, queries=2)
    # Without rows, the sizes are the model's.
    assert step_shape("forward", [], 6, spec) == StepShape("forward", 6, 16, 15, spec.vocabulary_size)


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
def test_format_bytes(count: int | None, text: str) -> None:
    assert format_bytes(count) == text
