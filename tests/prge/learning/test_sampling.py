"""Which rows a step sees."""

from __future__ import annotations

import pytest

from prge.learning.sampling import Sampler
from tests.numpy_engine import NumpyEngine
from tests.rows import long_choice, random_completions


def test_every_epoch_sees_every_row_once() -> None:
    sampler = Sampler(random_completions(12), NumpyEngine(batch_size=4).contract, seed=1)
    epochs = [
        [row for step in range(3 * e, 3 * e + 3) for row in sampler.batches(step)[0].rows] for e in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1, 13))
    assert epochs[0] != epochs[1]


def test_a_step_may_span_two_epochs() -> None:
    sampler = Sampler(random_completions(6), NumpyEngine(batch_size=4).contract, seed=1)
    rows = [row for step in range(3) for row in sampler.batches(step)[0].rows]
    assert sorted(rows[:6]) == sorted(rows[6:]) == list(range(1, 7))


def test_accumulated_calls_take_consecutive_rows() -> None:
    contract = NumpyEngine(batch_size=2).contract
    together = Sampler(random_completions(12), contract, seed=1, calls=3).batches(1)
    alone = [Sampler(random_completions(12), contract, seed=1).batches(step)[0] for step in (3, 4, 5)]
    assert [batch.rows for batch in together] == [batch.rows for batch in alone]


def test_chosen_examples_are_those_of_the_batches() -> None:
    sampler = Sampler(random_completions(12), NumpyEngine(batch_size=2).contract, seed=1, calls=3)
    batches = [batch.rows for batch in sampler.batches(2)]
    assert [example.row for example in sampler.chosen(2)] == [row for rows in batches for row in rows]


def test_candidates_of_an_example_stay_in_one_call() -> None:
    examples = [long_choice(row, [1], [[2, 3], [4, 5], [6, 7]], 0) for row in range(1, 5)]
    sampler = Sampler(examples, NumpyEngine(batch_size=7).contract, seed=0)
    assert sampler.per_call == 2
    with pytest.raises(ValueError, match="a call has 0 examples"):
        Sampler(examples, NumpyEngine(batch_size=2).contract, seed=0)


def test_a_step_has_as_many_examples_as_asked_for_in_any_number_of_calls() -> None:
    examples, contract = random_completions(12), NumpyEngine(batch_size=4).contract
    steps = {
        calls: Sampler(examples, contract, seed=1, calls=calls, batch_size=4).batches(1)
        for calls in (1, 2, 4)
    }
    assert {calls: [batch.examples for batch in batches] for calls, batches in steps.items()} == {
        1: [4], 2: [2, 2], 4: [1] * 4,
    }  # fmt: skip
    assert len({tuple(row for batch in batches for row in batch.rows) for batches in steps.values()}) == 1
    with pytest.raises(ValueError, match="a call has 8 examples, and room for 4"):
        Sampler(examples, contract, seed=1, batch_size=8)
