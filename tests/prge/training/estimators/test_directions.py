"""Directions are a function of (seed, step, query) alone and the same on every machine."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from prge.model_spec import AdaptedModule
from prge.training.estimators.directions import (
    DirectionSampler,
    RankOneDirections,
    philox,
    rademacher,
    truncate_to_grid,
)
from prge.training.sampler import row_order

_M0, _M1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_W0, _W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_MASK = 2**64 - 1
MODULES = (AdaptedModule("q", rank=2, in_features=4, out_features=3), AdaptedModule("v", 1, 4, 5))


def _philox_block(counter: list[int], key: list[int]) -> list[int]:
    """Compute Philox 4x64-10 after Salmon et al. 2011, figure 4, in plain integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(_M0 * c[0], 2**64)
        high1, low1 = divmod(_M1 * c[2], 2**64)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c


def test_random_integers_are_philox_of_seed_step_and_query() -> None:
    expected = [word for block in (1, 2) for word in _philox_block([block, 0, 0, 7], [123, 45])]
    assert philox(123, 45, 7, 8).tolist() == expected


def test_rademacher_uses_one_bit_per_sign_lowest_first() -> None:
    word = int(philox(1, 2, 3, 1)[0])
    expected = [1.0 if word >> bit & 1 else -1.0 for bit in range(64)]
    assert rademacher(1, 2, 3, 64).tolist() == expected


def test_rademacher_is_pinned() -> None:
    """A change would break the replay of all existing journals."""
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


def test_moments_and_independence() -> None:
    make = rademacher
    size = 200_000
    first, second = make(0, 0, 0, size), make(0, 0, 1, size)
    tolerance = 4 / size**0.5
    assert abs(first.mean()) < tolerance
    assert abs(first.var() - 1) < 2 * tolerance
    assert abs((first * second).mean()) < tolerance
    assert abs((first * make(0, 1, 0, size)).mean()) < tolerance
    assert abs((first * make(1, 0, 0, size)).mean()) < tolerance
    assert abs((first[1:] * first[:-1]).mean()) < tolerance


def test_directions_of_a_step() -> None:
    directions = DirectionSampler(seed=5, step=6, size=70)
    np.testing.assert_array_equal(directions(2), rademacher(5, 6, 2, 70))


@given(st.integers(0, 2**32), st.integers(0, 50), st.integers(1, 200))
def test_row_order_is_a_permutation(seed: int, epoch: int, rows: int) -> None:
    assert sorted(row_order(seed, epoch, rows).tolist()) == list(range(rows))


def test_rank_one_signs_are_the_stream_of_a_query_example_after_example() -> None:
    directions = RankOneDirections(5, 6, queries=2, examples=3, modules=MODULES)
    (_, u, v), (_, u_second, v_second) = directions.factors()
    assert (u.shape, v.shape, u_second.shape, v_second.shape) == ((2, 3, 2), (2, 3, 3), (2, 3, 1), (2, 3, 5))
    for query in range(2):
        stream = rademacher(5, 6, query, 3 * 11)
        together = np.concatenate([u[query], v[query], u_second[query], v_second[query]], axis=1)
        assert together.ravel().tolist() == stream.tolist()


@given(st.integers(0, 2**32), st.integers(0, 1000), st.integers(1, 4), st.integers(1, 6))
def test_an_example_keeps_its_directions_whatever_follows_it(
    seed: int, step: int, queries: int, examples: int
) -> None:
    few = RankOneDirections(seed, step, queries, examples, MODULES)
    many = RankOneDirections(seed, step, queries, examples + 3, MODULES)
    for (_, *here), (_, *there) in zip(few.factors(), many.factors(), strict=True):
        for factor, longer in zip(here, there, strict=True):
            assert np.array_equal(factor, longer[:, :examples])


def test_shared_directions_differ_by_query_alone() -> None:
    shared = RankOneDirections(5, 6, 3, 4, MODULES, shared=True)
    alone = RankOneDirections(5, 6, 3, 1, MODULES)
    for (_, *here), (_, *there) in zip(shared.factors(), alone.factors(), strict=True):
        for factor, single in zip(here, there, strict=True):
            assert np.array_equal(factor, np.repeat(single, 4, axis=1))
    first, second, _ = np.concatenate([np.concatenate([u, v], -1) for _, u, v in shared.factors()], -1)
    assert not np.array_equal(first, second)


def test_sequences_take_the_directions_of_their_example() -> None:
    directions = RankOneDirections(5, 6, 2, 3, MODULES)
    owner = np.array([1, 1, 2])
    result = directions.for_sequences(owner)
    assert list(result) == ["u.q", "v.q", "u.v", "v.v"]
    for matrix, u, v in directions.factors():
        for name, factor in ((matrix.u, u), (matrix.v, v)):
            assert result[name].dtype == np.float32
            for sequence, example in enumerate(owner.tolist()):
                assert np.array_equal(result[name][:, sequence], factor[:, example])


@pytest.mark.parametrize("shared", [False, True])
def test_a_single_projected_gradient_of_1_gives_its_direction(shared: bool) -> None:
    directions = RankOneDirections(1, 2, 3, 4, MODULES, shared)
    projected_gradients = np.zeros((3, 4))
    projected_gradients[1, 2] = 12
    np.testing.assert_array_equal(directions(1, 2), directions.gradient(projected_gradients))
    assert directions(0).dtype == np.float32


@pytest.mark.parametrize("shared", [False, True])
def test_gradient_is_the_mean_of_projected_gradient_times_rank_one_direction(shared: bool) -> None:
    directions = RankOneDirections(1, 2, 3, 4, MODULES, shared)
    projected_gradients = np.random.default_rng(0).normal(size=(3, 4))
    expected = [
        np.einsum("qe,qer,qeo->ro", projected_gradients, u, v).ravel() / projected_gradients.size
        for _, u, v in directions.factors()
    ]
    result = directions.gradient(projected_gradients)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, np.concatenate(expected), rtol=1e-6, atol=1e-7)


TABLES = arrays(np.float64, (3, 4), elements=st.floats(-1e37, 1e37, allow_subnormal=True))


@given(TABLES, st.randoms(use_true_random=False))
def test_the_order_of_a_sum_doesnt_change_a_bit_of_the_gradient(
    projected_gradients: np.ndarray, random
) -> None:  # type: ignore[no-untyped-def]
    directions = RankOneDirections(1, 2, 3, 4, MODULES)
    terms = [(query, example) for query in range(3) for example in range(4)]
    random.shuffle(terms)
    cut = truncate_to_grid(projected_gradients)
    gradient = []
    for matrix, u, v in directions.factors():
        total = np.zeros((matrix.rank, matrix.width))
        for term in terms:
            total += cut[term] * np.outer(u[term], v[term])
        gradient.append((total / 12).astype(np.float32).ravel())
    assert np.concatenate(gradient).tobytes() == directions.gradient(projected_gradients).tobytes()


@given(TABLES)
def test_a_journal_keeps_every_bit_of_projected_gradients_and_gradient(
    projected_gradients: np.ndarray,
) -> None:
    directions = RankOneDirections(1, 2, 3, 4, MODULES)
    cut = truncate_to_grid(projected_gradients)
    stored = np.array(json.loads(json.dumps(cut.tolist())))
    assert truncate_to_grid(stored).tobytes() == stored.tobytes() == cut.tobytes()
    assert directions.gradient(stored).tobytes() == directions.gradient(projected_gradients).tobytes()


@given(TABLES)
def test_a_grid_loses_at_most_a_billionth_of_the_largest_value(projected_gradients: np.ndarray) -> None:
    cut = truncate_to_grid(projected_gradients)
    largest = np.abs(projected_gradients).max()
    assert np.abs(cut - projected_gradients).max() <= largest * 2.0**-29
    assert np.abs(cut).max() <= largest
    if largest > 0:
        multiples = np.ldexp(cut, 30 - int(np.frexp(largest)[1]))
        assert np.array_equal(multiples, np.rint(multiples)) and np.abs(multiples).max() <= 2**30


def test_values_that_are_not_finite_are_not_truncated() -> None:
    assert np.isnan(truncate_to_grid(np.array([1.0, np.nan]))[1])
    assert np.isinf(truncate_to_grid(np.array([1.0, np.inf]))[1])
