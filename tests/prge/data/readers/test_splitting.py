"""Splitting rows by content: independent of the order, without overlap."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.data.readers.files import Row
from prge.data.readers.splitting import (
    MAX_DEV_ROWS,
    MIN_DEV_ROWS,
    Splits,
    content_hash,
    dev_row_count,
    split_rows,
)

TEXTS = st.lists(st.sampled_from("abcdefghijklmnopqrst"), max_size=60)


def rows(texts: Sequence[str]) -> list[Row]:
    return [Row(number, {"text": text}) for number, text in enumerate(texts, 1)]


def several(count: int) -> list[Row]:
    return rows([f"text {number}" for number in range(count)])


def numbers(part: Sequence[Row]) -> list[int]:
    return [row.number for row in part]


def texts_of(parts: Splits) -> list[set[str]]:
    return [{row.fields["text"] for row in part} for part in (parts.train, parts.dev)]


@given(TEXTS)
def test_every_row_is_in_one_part_with_its_equals(texts: list[str]) -> None:
    parts = split_rows(rows(texts))
    assert sorted([*numbers(parts.train), *numbers(parts.dev)]) == list(range(1, len(texts) + 1))
    train, dev = texts_of(parts)
    assert not train & dev
    for part in (parts.train, parts.dev):
        assert numbers(part) == sorted(numbers(part))


@given(TEXTS, st.randoms())
def test_the_order_of_rows_changes_no_part(texts: list[str], random: object) -> None:
    shuffled = list(texts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert texts_of(split_rows(rows(texts))) == texts_of(split_rows(rows(shuffled)))


@given(TEXTS)
def test_every_split_leaves_rows_to_train_on_and_to_score(texts: list[str]) -> None:
    parts = split_rows(rows(texts))
    assert bool(parts.train) == bool(texts)
    assert bool(parts.dev) == (len(set(texts)) >= 2)


@given(st.integers(2, 400), st.integers(1, 30))
def test_more_rows_move_few_of_the_others(count: int, more: int) -> None:
    before = {row.fields["text"] for row in split_rows(several(count)).dev}
    after = {row.fields["text"] for row in split_rows(several(count + more)).dev}
    assert len(before - after) <= more


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (3, 1),
        (10, 2),
        (50, 10),
        (100, MIN_DEV_ROWS),
        (1000, 100),
        (5000, MAX_DEV_ROWS),
        (100_000, MAX_DEV_ROWS),
    ],
)
def test_a_part_has_its_share_within_bounds(count: int, expected: int) -> None:
    assert dev_row_count(count) == expected
    if count <= 1000:
        assert len(split_rows(several(count)).dev) == expected


def test_few_rows_are_split_with_a_warning() -> None:
    parts = split_rows(several(3))
    assert (len(parts.train), len(parts.dev)) == (2, 1)
    assert parts.notes == ["dev: 1 of 3 rows, by a hash of their content; figures of so few rows are noisy"]


def test_equal_rows_cannot_be_split() -> None:
    parts = split_rows(rows(["same"] * 50))
    assert (len(parts.train), parts.dev) == (50, [])
    assert parts.notes == [
        "no dev rows can be split off: all rows are equal",
        "49 rows repeat others: equal rows are in one part",
    ]


def test_a_large_group_of_equals_stays_in_training() -> None:
    parts = split_rows(rows(["same"] * 100 + [f"{number}" for number in range(100)]))
    assert len(parts.dev) == 20
    assert "same" not in {row.fields["text"] for row in parts.dev}


def test_where_all_groups_are_large_the_smallest_is_split_off() -> None:
    parts = split_rows(rows(["a"] * 60 + ["b"] * 40))
    assert {row.fields["text"] for row in parts.dev} == {"b"}


def test_unread_columns_make_no_difference() -> None:
    twins = [Row(1, {"text": "a", "id": 1}), Row(2, {"id": 2, "text": "a"}), Row(3, {"text": "b", "id": 3})]
    parts = split_rows(twins, columns=["text"])
    assert {tuple(numbers(parts.train)), tuple(numbers(parts.dev))} == {(1, 2), (3,)}
    assert content_hash(twins[0]) != content_hash(twins[1])
    assert content_hash(Row(1, {"a": 1, "b": 2})) == content_hash(Row(9, {"b": 2, "a": 1}))
