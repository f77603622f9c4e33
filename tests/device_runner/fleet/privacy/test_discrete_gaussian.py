"""Tests that the noise has its nominal distribution, and reveals no more than normals would."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from device_runner.fleet.privacy.discrete_gaussian import discrete_gaussian, uniform_below
from prge.training.privacy_accounting import epsilon_of

DELTA = 1e-5


def _words(seed: int) -> Any:
    return np.random.Generator(np.random.PCG64(seed)).bit_generator.random_raw


def _masses(bits: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return values that are likely enough to count, and their probabilities."""
    numbers = np.arange(-(12 << bits), (12 << bits) + 1)
    masses = np.exp(-(numbers**2) / 2 / 4.0**bits)
    return numbers, masses / masses.sum()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_samples_have_their_nominal_probabilities(bits: int) -> None:
    samples = discrete_gaussian(bits, 400_000, _words(bits))
    numbers, masses = _masses(bits)
    counts, expected = np.histogram(samples, [*numbers, numbers[-1] + 1])[0], masses * len(samples)
    often = expected > 20
    distance = ((counts - expected) ** 2 / expected)[often].sum()
    # Chi-squared: five standard deviations above its mean.
    freedom = int(often.sum()) - 1
    assert distance < freedom + 5 * math.sqrt(2 * freedom)


def test_another_sampler_has_the_same_distribution() -> None:
    from opendp import prelude as dp

    dp.enable_features("contrib")
    expected = np.array(
        dp.m.make_gaussian(dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float), scale=4.0)(
            [0] * 100_000
        )
    )
    actual = discrete_gaussian(2, 100_000, _words(9))
    edges = np.arange(-11, 13)
    left, right = (np.histogram(each, edges)[0] for each in (actual, expected))
    distance = ((left - right) ** 2 / (left + right)).sum()
    assert distance < len(left) + 5 * math.sqrt(2 * len(left))


def test_epsilon_is_below_that_of_another_library() -> None:
    """The paper's bound comes from concentrated differential privacy, which is less tight."""
    from opendp import prelude as dp

    dp.enable_features("contrib")
    for noise in (0.5, 1.0, 4.0):
        scale = noise * 2**20
        space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
        profile = dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*space, scale=scale)).map(2.0**20)
        epsilon = epsilon_of([(noise, 1)], DELTA)
        assert 0.7 * profile.epsilon(DELTA) < epsilon <= profile.epsilon(DELTA)


@pytest.mark.parametrize("shift", [1, 37, 700, 1024, 3000])
def test_the_noise_reveals_at_most_what_normals_of_a_smaller_variance_reveal(shift: int) -> None:
    """Compute delta of two discrete Gaussians an integer apart, term by term, at the normals' epsilon."""
    bits = 10
    _, masses = _masses(bits)
    counted = math.sqrt(1 - 16 / 4.0**bits)
    for delta in (1e-3, 1e-5, 1e-9):
        epsilon = epsilon_of([(counted * 2**bits / shift, 1)], delta)
        excess = np.maximum(masses[shift:] - np.exp(epsilon) * masses[:-shift], 0).sum()
        assert excess + masses[:shift].sum() <= delta * (1 + 1e-6)


def test_samples_differ_and_have_the_nominal_deviation() -> None:
    samples = discrete_gaussian(20, 20_001)
    assert samples.shape == (20_001,) and abs(samples.mean()) < 0.05 * 2**20
    assert abs(samples.std() / 2**20 - 1) < 0.05
    assert not np.array_equal(samples, discrete_gaussian(20, 20_001))


def test_words_that_would_bias_the_result_are_rejected() -> None:
    words = iter([np.array([2**64 - 1, 7], np.uint64), np.array([2**64 - 2], np.uint64)])
    assert uniform_below(3, 2, lambda count: next(words)).tolist() == [(2**64 - 2) % 3, 1]
