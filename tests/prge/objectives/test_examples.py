"""Microbatches and counts of examples."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from prge.objectives.examples import Example, microbatches, sequences_of, target_count, token_count
from tests.rows import EXAMPLES_BY_FORM, classification, completion, long_choice

ROWS = [
    *[example for examples in EXAMPLES_BY_FORM.values() for example in examples],
    classification(1, [3, 4, 5], 2, 0),
]


@given(st.lists(st.sampled_from(ROWS), max_size=20), st.integers(1, 60))
def test_microbatches_have_all_examples_and_are_small(examples: list[Example], tokens: int) -> None:
    parts = [*microbatches(examples, tokens)]
    assert [example for part in parts for example in part] == examples
    assert all(len(part) == 1 or (part and token_count(part) <= tokens) for part in parts)
    # Each is as large as it can be.
    for part, after in pairwise(parts):
        assert token_count([*part, after[0]]) > tokens


def test_counts_of_examples() -> None:
    examples = [completion(1, [1, 2, 3, 4], 2), long_choice(2, [1, 2], [[3], [4, 5, 6]], 1)]
    assert [sequence.tokens for sequence in sequences_of(examples)] == [
        (1, 2, 3, 4),
        (1, 2, 3),
        (1, 2, 4, 5, 6),
    ]
    assert (token_count(examples), target_count(examples)) == (12, 6)
