"""The layout of a call's sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runner.engines.planning import (
    Layout,
    at_least_two,
    copies_together,
    layout_groups,
    micro_batches,
    padded_length,
    single_adapter_groups,
    slices,
)
from prge.engine import MAX_HIDDEN_STATES, IntArray, TokenSequence
from prge.formats.chain import Bounds

BOUNDS = Bounds(copies=3, batch=4, tokens=300, chunk=100)
# A block of this width takes about 512 tokens, as few as any.
WIDTH = 4096
COUNTS = st.lists(st.integers(1, BOUNDS.tokens), min_size=1, max_size=40)


def lengths_of(counts: list[int]) -> IntArray:
    return np.array([padded_length(count, BOUNDS) for count in counts])


def layouts_of(counts: list[int], data: st.DataObject) -> list[Layout]:
    """Return a layout for each row, some with branches."""
    branches = st.sampled_from([(), (1, 2)])
    lengths = lengths_of(counts).tolist()
    return [Layout(length, data.draw(branches) if length <= BOUNDS.chunk else ()) for length in lengths]


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
    sequences = [TokenSequence((count % 7,) * count) for count in counts]
    result = [*micro_batches(sequences, lengths, BOUNDS, passes=passes, chunk_passes=2)]
    order = np.concatenate(result).tolist()
    whole = [number for number in order if lengths[number] <= BOUNDS.chunk]
    chunked = order[len(whole) :]
    assert order == [
        *sorted(whole, key=lambda number: (int(lengths[number]), number)),
        *sorted(chunked, key=lambda number: (sequences[number].tokens, number)),
    ]
    for numbers, following in zip(result, [*result[1:], None], strict=True):
        are_whole = [bool(length <= BOUNDS.chunk) for length in lengths[numbers]]
        assert len({*are_whole}) == 1
        each = passes if are_whole[0] else 2
        held = int(lengths[numbers].sum()) * each
        assert len(numbers) == 1 or held <= MAX_HIDDEN_STATES
        if following is not None and (lengths[following[0]] <= BOUNDS.chunk) == are_whole[0]:
            assert held + int(lengths[following[0]]) * each > MAX_HIDDEN_STATES


@given(COUNTS, st.data())
def test_every_row_is_computed_once_and_only_with_rows_of_its_layout(
    counts: list[int], data: st.DataObject
) -> None:
    layouts, numbers = layouts_of(counts, data), some_of(counts, data)
    result = [*layout_groups(numbers, layouts, BOUNDS, WIDTH)]
    assert sorted(np.concatenate(result).tolist()) == numbers.tolist()
    lengths = [layouts[rows[0]].length for rows in result]
    assert lengths == sorted(lengths)
    for rows, length in zip(result, lengths, strict=True):
        assert len({layouts[number] for number in rows}) == 1
        assert len(rows) <= (BOUNDS.batch if length <= BOUNDS.chunk else 1)
        assert rows.tolist() == sorted(rows.tolist())


@given(COUNTS, st.data())
def test_rows_of_one_adapter_replace_copies_too(counts: list[int], data: st.DataObject) -> None:
    layouts, numbers = layouts_of(counts, data), some_of(counts, data)
    result = [*single_adapter_groups(numbers, layouts, BOUNDS, WIDTH)]
    assert sorted(np.concatenate([rows.ravel() for rows in result]).tolist()) == numbers.tolist()
    for rows in result:
        length = layouts[rows.flat[0]].length
        assert {layouts[number] for number in rows.ravel()} == {layouts[rows.flat[0]]}
        assert len(rows) <= copies_together(rows.shape[1], length, BOUNDS, WIDTH)
        assert rows.shape[1] <= (BOUNDS.batch if length <= BOUNDS.chunk else 1)


def test_branches_continue_the_tokens_before_the_first_and_hide_from_each_other() -> None:
    layout = Layout(7, (2, 4))
    assert layout.positions.tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert (~layout.hides()).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 1, 1, 1],
    ]
    assert (~layout.hides(2))[-1].astype(int).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert (~layout.hides(3))[4].astype(int).tolist() == [1, 1, 0, 0, 1, 0, 0]


def test_tokens_of_a_row_without_branches_see_those_before_them() -> None:
    layout = Layout(3)
    assert layout.positions.tolist() == [0, 1, 2]
    assert (~layout.hides()).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert (~layout.hides(1)).astype(int).tolist() == np.eye(3).tolist()


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
    alike, layouts = np.arange(8), [Layout(length)] * 8
    groups = [*layout_groups(alike, layouts, BOUNDS, width, 1 + directions)]
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
