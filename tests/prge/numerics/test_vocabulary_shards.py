"""A vocabulary that is read in shards gives the log-probabilities that it gives as a whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prge.engine import FloatArray
from prge.numerics.vocabulary_shards import TargetLogProbs, count_shards

ALL = slice(None)


@pytest.mark.parametrize(
    ("vocabulary_size", "width", "shards"),
    [
        (2, 4096, 1),
        (49_152, 576, 2),
        (50_257, 768, 29),
        (50_257, 1024, 29),
        (32_000, 2048, 4),
        (151_936, 896, 8),
        (262_144, 1152, 16),
        (128_256, 4096, 32),
        (104_729, 4096, 1),  # a prime: there is no cut
    ],
)
def test_a_vocabulary_is_divided_evenly_into_few_shards(
    vocabulary_size: int, width: int, shards: int
) -> None:
    assert count_shards(vocabulary_size, width) == shards


def oracle(logits: FloatArray, targets: FloatArray) -> FloatArray:
    highest = logits.max(-1, keepdims=True)
    log_total = highest[:, 0] + np.log(np.exp(logits - highest).sum(-1))
    return logits[np.arange(len(targets)), targets] - log_total


class Shards:
    """An output head in float32, as an engine's, that counts its calls."""

    def __init__(self, logits: FloatArray, shard_size: int, tangents: FloatArray | None = None) -> None:
        self.logits, self.shard_size, self.tangents, self.calls = logits, shard_size, tangents, 0

    def read(self, targets: FloatArray) -> TargetLogProbs:
        queries = 0 if self.tangents is None else len(self.tangents)
        reading = TargetLogProbs(targets, self.shard_size, queries)
        for shard in range(self.logits.shape[1] // self.shard_size):
            index = reading.local_targets(shard, ALL)[0]
            columns = slice(shard * self.shard_size, (shard + 1) * self.shard_size)

            def parts(shift: FloatArray) -> tuple[FloatArray, FloatArray | None]:
                self.calls += 1
                logits = self.logits[:, columns].astype(np.float32) - shift[:, None]  # noqa: B023
                with np.errstate(over="ignore"):
                    exponentials = np.exp(logits)
                chosen = np.take_along_axis(logits, index[:, None], 1)[:, 0]  # noqa: B023
                answer = np.stack([chosen, exponentials.sum(-1)], -1)
                if self.tangents is None:
                    return answer, None
                moved = self.tangents[..., columns]  # noqa: B023
                positions = np.broadcast_to(index[:, None], (*moved.shape[:2], 1))  # noqa: B023
                at = np.take_along_axis(moved, positions, 2)[..., 0]
                return answer, np.stack([at, (moved * exponentials).sum(-1)], -1)

            reading.add(shard, ALL, *reading.compute_shifted(ALL, parts))
        return reading


@given(
    seed=st.integers(0, 1000),
    shards=st.integers(1, 5),
    middle=st.sampled_from([0.0, -40.0, 60.0, -300.0, 1000.0]),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
)
@settings(derandomize=True)
def test_logprobs_and_their_tangents_equal_those_of_the_whole_vocabulary(
    seed: int, shards: int, middle: float, spread: float
) -> None:
    random = np.random.default_rng(seed)
    logits = (middle + spread * random.standard_normal((4, 6 * shards))).astype(np.float32).astype(np.float64)
    tangents = random.standard_normal((3, *logits.shape))
    targets = random.integers(0, logits.shape[1], 4)
    reading = Shards(logits, 6, tangents).read(targets)
    expected = oracle(logits, targets)
    np.testing.assert_allclose(reading.logprobs, expected, rtol=2e-6, atol=1e-6 * (10 + abs(middle)))
    probability = np.exp(np.stack([oracle(logits, np.full(4, word)) for word in range(logits.shape[1])], -1))
    mean = (probability * tangents).sum(-1)
    np.testing.assert_allclose(
        reading.tangents, tangents[:, np.arange(4), targets] - mean, rtol=1e-4, atol=1e-5 * (10 + abs(middle))
    )


def test_a_log_probability_may_be_less_than_that_of_the_least_float() -> None:
    reading = Shards(np.array([[0.0, 500.0, 0.0, 1.0]]), 2).read(np.array([2]))
    assert reading.logprobs.tolist() == [-500.0]


@pytest.mark.parametrize(("middle", "calls"), [(0.0, 3), (-60.0, 3), (70.0, 3), (-100.0, 4), (170.0, 5)])
def test_only_a_first_shard_with_logits_far_from_0_is_computed_again(middle: float, calls: int) -> None:
    shards = Shards(np.full((2, 9), middle), 3)
    np.testing.assert_allclose(shards.read(np.array([0, 8])).logprobs, -np.log(9), rtol=1e-5)
    assert shards.calls == calls


@pytest.mark.parametrize("strange", [np.nan, np.inf, 1e30])
def test_logits_that_are_nan_give_nan(strange: float) -> None:
    with np.errstate(invalid="ignore"):
        reading = Shards(np.array([[0.0, strange]]), 2).read(np.array([0]))
    assert not np.isfinite(reading.logprobs).any()
