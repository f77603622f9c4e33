"""Evolution strategies: estimates of the gradient of a reward that is a known function of the adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.engine import FloatArray
from prge.formats.adapter import Adapter
from prge.formats.journal import Record
from prge.objectives.examples import Example
from prge.training.estimators.differences import Antithetic, OneSided
from prge.training.estimators.directions import DirectionSampler
from prge.training.estimators.evolution import EvolutionStrategy, RewardShaping, shape_rewards
from prge.training.estimators.protocol import Step
from prge.training.estimators.rollouts import Rollout
from tests.numpy_engine import NumpyEngine, make_nonzero_adapter
from tests.rows import random_completions

SEED, STEP = 3, 5


@dataclass
class LinearRewards:
    """A source of completions whose reward is the product of the adapter's values with the gradient."""

    gradient: FloatArray
    offset: float = 0.0
    calls: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def start(self) -> FloatArray:
        return np.zeros_like(self.gradient)

    def sample(
        self, adapters: Sequence[Adapter], prompts: Sequence[Example], count: int, *, seed: int, step: int
    ) -> list[list[list[Rollout]]]:
        self.calls.append((len(adapters), seed, step))
        return [
            [
                [Rollout((1, 2), float(adapter.values @ self.gradient) + self.offset * number)] * count
                for number, _ in enumerate(prompts)
            ]
            for adapter in adapters
        ]

    def step(self, step: int) -> Record | None:
        return None


@pytest.fixture
def adapter() -> Adapter:
    return make_nonzero_adapter(NumpyEngine())


@pytest.fixture
def source(adapter: Adapter) -> LinearRewards:
    return LinearRewards(np.random.default_rng(0).normal(0, 0.1, adapter.size).astype(np.float32), 0.3)


def step(adapter: Adapter, source: LinearRewards) -> Step:
    return Step(adapter, random_completions(4), SEED, STEP, rollouts=source)


def test_projected_gradients_are_negative_derivatives_of_the_reward(
    adapter: Adapter, source: LinearRewards
) -> None:
    estimator = EvolutionStrategy(Antithetic(4, 1e-2), 0.0, "none")
    measurement = estimator.measure(NumpyEngine(), step(adapter, source))
    directions = DirectionSampler(SEED, STEP, adapter.size)
    expected = [-(directions(query) @ source.gradient) for query in range(4)]
    np.testing.assert_allclose(measurement.projected_gradients, expected, rtol=1e-3)
    assert source.calls == [(8, SEED, STEP)], "all copies are sampled at once"
    mean = float(adapter.values @ source.gradient) + 0.3 * 1.5
    assert measurement.loss == pytest.approx(-mean) and measurement.facts["reward"] == pytest.approx(mean)
    assert measurement.facts["completion_tokens"] == 8 * 4 * 2


@pytest.mark.parametrize("rule", [Antithetic(64, 1e-2), OneSided(64, 1e-2)])
@pytest.mark.parametrize("shaping", ["standardized", "ranked", "none"])
def test_a_step_against_the_gradient_raises_the_reward(
    adapter: Adapter, source: LinearRewards, rule: Antithetic | OneSided, shaping: RewardShaping
) -> None:
    estimator = EvolutionStrategy(rule, 0.0, shaping)
    measurement = estimator.measure(NumpyEngine(), step(adapter, source))
    gradient = estimator.gradient(measurement.journal_fields, SEED, STEP, adapter.modules)
    cosine = -(gradient @ source.gradient) / np.linalg.norm(gradient) / np.linalg.norm(source.gradient)
    # 64 random directions of 64 or more values.
    assert cosine > 0.3


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9))
def test_shaped_rewards_are_centered_and_keep_the_order(rewards: list[float]) -> None:
    values = np.array(rewards)
    for shaping in ("standardized", "ranked"):
        shaped = shape_rewards(values, shaping)  # type: ignore[arg-type]
        assert shaped.mean() == pytest.approx(0, abs=1e-6)
        order = np.argsort(values)
        assert (np.diff(shaped[order]) >= 0).all()
    np.testing.assert_array_equal(shape_rewards(values, "none"), values)


def test_equal_rewards_move_nothing() -> None:
    for shaping in ("standardized", "ranked"):
        np.testing.assert_array_equal(shape_rewards(np.full(6, 0.7), shaping), np.zeros(6))  # type: ignore[arg-type]
    np.testing.assert_allclose(shape_rewards(np.array([0.0, 1.0, 1.0, 5.0]), "ranked"), [-0.5, 0, 0, 0.5])
