"""Noise of whole numbers has the distribution that its name says, and tells no more than normals would."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from device_runner.fleet.privacy.discrete_gaussian import discrete_gaussian, uniform_below
from prge.learning.accounting import epsilon_of

DELTA = 1e-5


def _words(seed: int) -> Any:
    return np.random.Generator(np.random.PCG64(seed)).bit_generator.random_raw


def _masses(bits: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Numbers that are worth counting, and their probabilities."""
    numbers = np.arange(-(12 << bits), (12 << bits) + 1)
    masses = np.exp(-(numbers**2) / 2 / 4.0**bits)
    return numbers, masses / masses.sum()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_numbers_come_as_often_as_their_probabilities_say(bits: int) -> None:
    drawn = discrete_gaussian(bits, 400_000, _words(bits))
    numbers, masses = _masses(bits)
    seen, expected = np.histogram(drawn, [*numbers, numbers[-1] + 1])[0], masses * len(drawn)
    often = expected > 20
    distance = ((seen - expected) ** 2 / expected)[often].sum()
    # Chi-squared: five deviations above its mean.
    freedom = int(often.sum()) - 1
    assert distance < freedom + 5 * math.sqrt(2 * freedom)


def test_a_kept_sampler_draws_the_same_distribution() -> None:
    from opendp import prelude as dp

    dp.enable_features("contrib")
    theirs = np.array(
        dp.m.make_gaussian(dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float), scale=4.0)(
            [0] * 100_000
        )
    )
    ours = discrete_gaussian(2, 100_000, _words(9))
    edges = np.arange(-11, 13)
    left, right = (np.histogram(each, edges)[0] for each in (ours, theirs))
    distance = ((left - right) ** 2 / (left + right)).sum()
    assert distance < len(left) + 5 * math.sqrt(2 * len(left))


def test_its_epsilon_is_below_that_of_a_kept_library() -> None:
    """Theirs comes from concentrated differential privacy, which bounds less tightly."""
    from opendp import prelude as dp

    dp.enable_features("contrib")
    for noise in (0.5, 1.0, 4.0):
        scale = noise * 2**20
        space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
        profile = dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*space, scale=scale)).map(2.0**20)
        ours = epsilon_of([(noise, 1)], DELTA)
        assert 0.7 * profile.epsilon(DELTA) < ours <= profile.epsilon(DELTA)


@pytest.mark.parametrize("shift", [1, 37, 700, 1024, 3000])
def test_it_tells_at_most_what_normals_of_a_smaller_variance_tell(shift: int) -> None:
    """Delta of two discrete Gaussians apart by a whole number, term by term, at the normals' epsilon."""
    bits = 10
    _, masses = _masses(bits)
    counted = math.sqrt(1 - 16 / 4.0**bits)
    for delta in (1e-3, 1e-5, 1e-9):
        epsilon = epsilon_of([(counted * 2**bits / shift, 1)], delta)
        told = np.maximum(masses[shift:] - np.exp(epsilon) * masses[:-shift], 0).sum()
        assert told + masses[:shift].sum() <= delta * (1 + 1e-6)


def test_it_is_never_the_same_again_and_has_its_deviation() -> None:
    drawn = discrete_gaussian(20, 20_001)
    assert drawn.shape == (20_001,) and abs(drawn.mean()) < 0.05 * 2**20
    assert abs(drawn.std() / 2**20 - 1) < 0.05
    assert not np.array_equal(drawn, discrete_gaussian(20, 20_001))


def test_words_that_would_make_some_numbers_likelier_are_drawn_again() -> None:
    drawn = iter([np.array([2**64 - 1, 7], np.uint64), np.array([2**64 - 2], np.uint64)])
    assert uniform_below(3, 2, lambda count: next(drawn)).tolist() == [(2**64 - 2) % 3, 1]
