"""Drafts are the tokens that followed the same n-gram before; wrong drafts make them rarer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.generation.drafts import PromptLookup

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def test_a_draft_is_what_followed_the_same_tokens() -> None:
    assert PromptLookup([5, 6, 7, 8, 9, 1, 5, 6, 7]).draft(8) == [8, 9]


def test_the_longest_n_gram_and_then_its_latest_occurrence_decide() -> None:
    assert PromptLookup([9, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2]).draft(1) == [4]
    trusted = PromptLookup([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2])
    trusted.note(2, 2)
    assert trusted.draft(1) == [3]


def test_two_tokens_are_enough_after_a_draft_that_was_right() -> None:
    lookup = PromptLookup([1, 2, 3, 1, 2])
    assert lookup.draft(1) == []
    lookup.note(2, 2)
    assert lookup.draft(1) == [3]


def test_a_draft_can_repeat_its_own_tokens() -> None:
    assert PromptLookup([1, 2, 1, 2, 1]).draft(2) == [2, 1]
    assert PromptLookup([7, 7, 7, 7]).draft(2) == [7, 7]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_there_is_no_draft_without_an_earlier_occurrence(tokens: list[int]) -> None:
    assert PromptLookup(tokens).draft(8) == []


def test_drafts_grow_while_they_are_right() -> None:
    lookup, sizes = PromptLookup([1, 2] * 20), []
    for _ in range(5):
        sizes.append(len(lookup.draft(100)))
        lookup.note(sizes[-1], sizes[-1])
    assert sizes == [2, 4, 8, 15, 15]
    assert len(lookup.draft(3)) == 3


def test_wrong_drafts_pause_longer_each_time() -> None:
    lookup, pauses = PromptLookup([1, 2] * 20), []
    for _ in range(6):
        pause = 0
        while not (draft := lookup.draft(8)):
            pause += 1
        pauses.append(pause)
        lookup.note(len(draft), 0)
    assert pauses == [0, 2, 8, 26, 64, 64]
    while not lookup.draft(8):
        pass
    lookup.note(2, 2)
    assert lookup.draft(8)


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_prompt_and_pushed_tokens_are_treated_alike(
    first: list[int], more: list[int], max_tokens: int
) -> None:
    grown = PromptLookup(first)
    for token in more:
        grown.push(token)
    draft = grown.draft(max_tokens)
    assert draft == PromptLookup(first + more).draft(max_tokens)
    assert len(draft) <= max_tokens
