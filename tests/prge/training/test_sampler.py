"""The examples of each step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.objectives.examples import weighted_by_tokens
from prge.training.sampler import Sampler, max_sequences
from tests.rows import completion, long_choice, random_completions


def _rows(sampler: Sampler, steps: range) -> list[int]:
    return [example.row for step in steps for example in sampler.batch(step)]


def test_every_epoch_sees_every_row_once() -> None:
    sampler = Sampler(random_completions(12), 4, seed=1)
    epochs = [_rows(sampler, range(3 * e, 3 * e + 3)) for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1, 13))
    assert epochs[0] != epochs[1]


def test_a_step_may_span_two_epochs() -> None:
    rows = _rows(Sampler(random_completions(6), 4, seed=1), range(3))
    assert sorted(rows[:6]) == sorted(rows[6:]) == list(range(1, 7))


def test_a_larger_step_takes_the_rows_of_several_smaller_ones() -> None:
    large, small = (Sampler(random_completions(12), count, seed=1) for count in (6, 2))
    assert _rows(large, range(1, 2)) == _rows(small, range(3, 6))


def test_examples_at_a_step_are_the_batch_without_token_weights() -> None:
    rows = [completion(row, [row, 2, 3, 4, 5][: 2 + row % 3], 1) for row in range(1, 13)]
    for step in range(4):
        by_token = Sampler(rows, 6, 1, "token")
        chosen = by_token.examples_at(step)
        assert all(example is rows[example.row - 1] for example in chosen)
        assert Sampler(rows, 6, 1).batch(step) == chosen
        assert by_token.batch(step) == weighted_by_tokens(chosen) != chosen


@pytest.mark.parametrize("count", [1, 5, 12, 30])
def test_a_step_has_batch_size_examples(count: int) -> None:
    sampler = Sampler(random_completions(12), count, seed=1)
    assert len(sampler.batch(1)) == sampler.batch_size == count


def test_a_step_has_an_example() -> None:
    with pytest.raises(ValueError, match=r"\b0\b"):
        Sampler(random_completions(12), 0, seed=0)


@given(st.integers(1, 9), st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_sequences_of_steps_are_counted_in_any_order(count: int, steps: list[int]) -> None:
    examples = [long_choice(row, [1], [[2, 3], [4], [5]][: 1 + row % 3], 0) for row in range(1, 8)]
    sampler = Sampler(examples, count, seed=3)
    for number in steps:
        examples_taken = [example for step in range(number) for example in sampler.batch(step)]
        assert sampler.sequences(number) == sum(len(example.sequences) for example in examples_taken)


def test_the_most_sequences_of_an_example() -> None:
    assert max_sequences([]) == 1
    assert max_sequences([*random_completions(2), long_choice(3, [1], [[2], [3], [4]], 0)]) == 3
