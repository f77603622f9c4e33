"""The layout of a call's sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runner.engines.planning import (
    at_least_two,
    copies_together,
    length_groups,
    micro_batches,
    padded_length,
    single_adapter_groups,
    slices,
)
from prge.engine import MAX_HIDDEN_STATES, IntArray
from prge.formats.chain import Bounds

BOUNDS = Bounds(copies=3, batch=4, tokens=300, chunk=100)
# A block of this width takes about 512 tokens, as few as any.
WIDTH = 4096
COUNTS = st.lists(st.integers(1, BOUNDS.tokens), min_size=1, max_size=40)


def lengths_of(counts: list[int]) -> IntArray:
    return np.array([padded_length(count, BOUNDS) for count in counts])


def some_of(counts: list[int], data: st.DataObject) -> IntArray:
    """Return the numbers of some rows, as in a micro-batch."""
    numbers = st.sets(st.integers(0, len(counts) - 1), min_size=1)
    return np.array(sorted(data.draw(numbers)))


@pytest.mark.parametrize(
    ("tokens", "length"),
    [(1, 8), (2, 8), (8, 8), (9, 16), (96, 96), (97, 100), (100, 100), (101, 101), (299, 299)],
)
def test_a_sequence_is_padded_to_a_multiple_and_a_long_sequence_is_not_padded(
    tokens: int, length: int
) -> None:
    assert padded_length(tokens, BOUNDS) == length


def test_a_program_for_few_tokens_gets_no_more() -> None:
    assert [padded_length(tokens, Bounds(tokens=5)) for tokens in (1, 5)] == [5, 5]


@given(COUNTS, st.integers(1, 400))
def test_every_sequence_is_in_one_micro_batch_shorter_ones_first(counts: list[int], passes: int) -> None:
    lengths = lengths_of(counts)
    result = [*micro_batches(lengths, passes)]
    order = np.concatenate(result).tolist()
    assert order == sorted(range(len(counts)), key=lambda number: int(lengths[number]))
    states = [int(lengths[numbers].sum()) * passes for numbers in result]
    for numbers, held, following in zip(result, states, [*result[1:], None], strict=True):
        assert len(numbers) == 1 or held <= MAX_HIDDEN_STATES
        assert following is None or held + int(lengths[following[0]]) * passes > MAX_HIDDEN_STATES


@given(COUNTS, st.data())
def test_every_row_is_computed_once_and_only_with_rows_of_its_length(
    counts: list[int], data: st.DataObject
) -> None:
    lengths, numbers = lengths_of(counts), some_of(counts, data)
    result = [*length_groups(numbers, lengths, BOUNDS, WIDTH)]
    assert sorted(np.concatenate(result).tolist()) == numbers.tolist()
    for rows in result:
        assert len({*lengths[rows].tolist()}) == 1
        assert len(rows) <= (BOUNDS.batch if lengths[rows[0]] <= BOUNDS.chunk else 1)
        assert rows.tolist() == sorted(rows.tolist())


@given(COUNTS, st.data())
def test_rows_of_one_adapter_replace_copies_too(counts: list[int], data: st.DataObject) -> None:
    lengths, numbers = lengths_of(counts), some_of(counts, data)
    result = [*single_adapter_groups(numbers, lengths, BOUNDS, WIDTH)]
    assert sorted(np.concatenate([rows.ravel() for rows in result]).tolist()) == numbers.tolist()
    for rows in result:
        length = int(lengths[rows.flat[0]])
        assert (lengths[rows] == length).all()
        assert len(rows) <= copies_together(rows.shape[1], length, BOUNDS, WIDTH)
        assert rows.shape[1] <= (BOUNDS.batch if length <= BOUNDS.chunk else 1)


@pytest.mark.parametrize(
    ("length", "width", "directions", "rows", "copies"),
    [
        (64, WIDTH, 0, 4, 2),
        (100, WIDTH, 0, 4, 1),
        (64, 64, 0, 4, 3),
        (64, WIDTH, 4, 2, None),
        (100, WIDTH, 8, 1, None),
        (300, 64, 0, 1, 1),
    ],
    ids=["a wide model", "longer rows", "a narrow model", "directions", "one row at least", "in chunks"],
)
def test_few_tokens_pass_a_block_together_so_that_they_stay_in_the_cache(
    length: int, width: int, directions: int, rows: int, copies: int | None
) -> None:
    alike, lengths = np.arange(8), np.full(8, length)
    groups = [*length_groups(alike, lengths, BOUNDS, width, 1 + directions)]
    assert {*map(len, groups)} == {rows}
    if copies is not None:
        assert copies_together(rows, length, BOUNDS, width) == copies


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 9))
def test_slices_are_few_and_have_similar_sizes(count: int, max_size: int, start: int) -> None:
    result = [*slices(start + count, max_size, start)]
    assert [position for some in result for position in range(some.stop)[some]] == [
        *range(start, start + count)
    ]
    assert len(result) == -(-count // max_size)
    sizes = [some.stop - some.start for some in result]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_a_single_row_is_repeated() -> None:
    assert at_least_two(np.array([[1.0, 2.0]])).tolist() == [[1, 2], [1, 2]]
    assert at_least_two(np.array([[[1.0], [2.0]]]).swapaxes(1, 2), -2).tolist() == [[[1, 2], [1, 2]]]
    assert at_least_two(np.ones((3, 2))).shape == (3, 2)
