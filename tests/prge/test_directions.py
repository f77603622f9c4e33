"""Directions are a function of (seed, step, query) alone and the same on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.directions import Directions, gaussian, philox, rademacher
from prge.sampling import row_order

_M0, _M1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_W0, _W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_MASK = 2**64 - 1


def _philox_block(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x64-10 written from Salmon et al. 2011, figure 4, in plain integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(_M0 * c[0], 2**64)
        high1, low1 = divmod(_M1 * c[2], 2**64)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c


def test_words_are_philox_of_seed_step_and_query() -> None:
    expected = [word for block in (1, 2) for word in _philox_block([block, 0, 0, 7], [123, 45])]
    assert philox(123, 45, 7, 8).tolist() == expected


def test_rademacher_takes_one_bit_each_lowest_first() -> None:
    word = int(philox(1, 2, 3, 1)[0])
    expected = [1.0 if word >> bit & 1 else -1.0 for bit in range(64)]
    assert rademacher(1, 2, 3, 64).tolist() == expected


def test_rademacher_is_pinned() -> None:
    """A change here breaks the replay of every journal that was ever written."""
    signs = rademacher(42, 1000, 3, 10_001)
    assert signs.dtype == np.float32
    assert (
        hashlib.sha256((signs > 0).tobytes()).hexdigest()
        == "5f39f7a285daf928e60d3184a43aad8d6e495dc3877ce5ed549b25a902be04af"
    )


def test_row_order_is_pinned() -> None:
    assert row_order(42, 1, 10).tolist() == [3, 8, 6, 7, 2, 5, 9, 0, 4, 1]


@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 2**20), st.integers(1, 300))
def test_a_longer_direction_begins_with_the_shorter(seed: int, step: int, query: int, size: int) -> None:
    np.testing.assert_array_equal(
        rademacher(seed, step, query, size), rademacher(seed, step, query, 400)[:size]
    )


@pytest.mark.parametrize("make", [rademacher, gaussian])
def test_moments_and_independence(make) -> None:  # type: ignore[no-untyped-def]
    size = 200_000
    first, second = make(0, 0, 0, size), make(0, 0, 1, size)
    tolerance = 4 / size**0.5
    assert abs(first.mean()) < tolerance
    assert abs(first.var() - 1) < 2 * tolerance
    assert abs((first * second).mean()) < tolerance
    assert abs((first * make(0, 1, 0, size)).mean()) < tolerance
    assert abs((first * make(1, 0, 0, size)).mean()) < tolerance
    assert abs((first[1:] * first[:-1]).mean()) < tolerance


def test_gaussian_has_gaussian_tails() -> None:
    sample = gaussian(0, 0, 0, 400_001)
    assert len(sample) == 400_001
    for bound, share in ((1, 0.3173), (2, 0.0455), (3, 0.0027)):
        assert (np.abs(sample) > bound).mean() == pytest.approx(share, abs=2e-3)


def test_directions_of_a_step() -> None:
    directions = Directions("rademacher", seed=5, step=6, size=70)
    np.testing.assert_array_equal(directions(2), rademacher(5, 6, 2, 70))


@given(st.integers(0, 2**32), st.integers(0, 50), st.integers(1, 200))
def test_row_order_is_a_permutation(seed: int, epoch: int, rows: int) -> None:
    assert sorted(row_order(seed, epoch, rows).tolist()) == list(range(rows))
