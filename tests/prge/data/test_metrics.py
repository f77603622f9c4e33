"""Metrics against values computed by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.data.metrics import (
    accuracy,
    exact_match,
    longest_common_subsequence,
    macro_f1,
    normalized_answer,
    perplexity,
    rouge_l,
    token_f1,
)


def test_accuracy() -> None:
    assert accuracy([0, 1, 1], [0, 1, 0]) == pytest.approx(2 / 3)


def test_macro_f1() -> None:
    # class 0: TP 2 FP 1 FN 0 -> 4/5; class 1: TP 1 FP 0 FN 1 -> 2/3; class 2: FP 0 FN 1 and 1 -> 0
    assert macro_f1([0, 0, 1, 0, 1], [0, 0, 1, 1, 2]) == pytest.approx((4 / 5 + 2 * 1 / 4 + 0) / 3)
    assert macro_f1(["a", "b"], ["a", "b"]) == 1


def test_normalized_answer() -> None:
    assert normalized_answer("The  U.S. army, an Army!") == "us army army"
    assert normalized_answer("Thea") == "thea"


@pytest.mark.parametrize(
    ("prediction", "answers", "value"),
    [
        ("the Rome", ["Rome"], 1),
        ("in Rome", ["Rome", "Italy"], 2 / 3),
        ("Paris", ["Rome"], 0),
        ("", ["Rome"], 0),
        ("the", ["a"], 1),
        ("Rome Rome", ["Rome"], 2 / 3),
        ("Rome", [], 0),
    ],
)
def test_token_f1(prediction: str, answers: list[str], value: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(value)


@pytest.mark.parametrize(
    ("prediction", "answers", "value"),
    [("The  Rome!", ["Paris", "Rome"], 1), ("in Rome", ["Rome"], 0), ("", ["the"], 1), ("Rome", [], 0)],
)
def test_exact_match(prediction: str, answers: list[str], value: float) -> None:
    assert exact_match(prediction, answers) == value


@pytest.mark.parametrize(
    ("prediction", "answers", "value"),
    [
        # Lin 2004, section 3.1: the reference is "police killed the gunman"
        ("police kill the gunman", ["police killed the gunman"], 3 / 4),
        ("the gunman kill police", ["police killed the gunman"], 2 / 4),
        ("the gunman police killed", ["police killed the gunman"], 2 / 4),
        # 2 words in common, 3 predicted and 5 right: 2 * 2 / (3 + 5)
        ("A cat, sat.", ["the cat then SAT down"], 4 / 8),
        ("Rome", ["Paris", "rome!"], 1),
        ("", ["Rome"], 0),
        ("?", ["!"], 1),
        ("Rome", [], 0),
    ],
)
def test_rouge_l(prediction: str, answers: list[str], value: float) -> None:
    assert rouge_l(prediction, answers) == pytest.approx(value)


def _longest(first: list[int], second: list[int]) -> int:
    """Return the longest common subsequence by its definition."""
    for length in range(len(first), 0, -1):
        for chosen in itertools.combinations(first, length):
            rest = iter(second)
            if all(element in rest for element in chosen):
                return length
    return 0


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=12))
def test_longest_common_subsequence(first: list[int], second: list[int]) -> None:
    assert longest_common_subsequence(first, second) == _longest(first, second)


def test_perplexity() -> None:
    assert perplexity([math.log(4)], [5]) == pytest.approx(4)
    assert perplexity([math.log(2), math.log(16)], [3, 1]) == pytest.approx(2 ** (7 / 4))
    assert perplexity([1000.0], [1]) == math.inf


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_measures_are_shares(pairs: list[tuple[int, int]]) -> None:
    predictions, labels = zip(*pairs, strict=True)
    assert 0 <= macro_f1(predictions, labels) <= 1
    assert (accuracy(predictions, labels) == 1) == (macro_f1(predictions, labels) == 1)


def test_predictions_of_no_rows_or_of_another_number_are_refused() -> None:
    for arguments in (([], []), ([1], [1, 2])):
        with pytest.raises(ValueError, match=f"{len(arguments[0])} .* {len(arguments[1])} "):
            accuracy(*arguments)
