"""Sequences with branches, and the sequences that they stand for."""

from __future__ import annotations

from prge.engine import Target, TokenSequence


def target(position: int, candidate: int) -> Target:
    return Target(position, 10 * candidate + position, 0.5, candidate)


def test_a_sequence_without_branches_stays_whole() -> None:
    sequence = TokenSequence((5, 6), (target(1, 0), target(1, 1)))
    assert sequence.split() == (sequence,)


def test_each_candidate_has_the_common_tokens_and_its_branch() -> None:
    targets = (target(1, 0), target(2, 0), target(1, 1), target(4, 1))
    sequence = TokenSequence((5, 6, 7, 8, 9), targets, (2, 3))
    assert sequence.split() == (
        TokenSequence((5, 6, 7), (target(1, 0), target(2, 0))),
        TokenSequence((5, 6, 8, 9), (target(1, 1), Target(3, 14, 0.5, 1))),
    )
