"""What steps that learn from a reward record: equal rewards, lengths, and the divergence from the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from prge.engine import FloatArray, TokenSequence
from prge.formats.adapter import Adapter
from prge.formats.journal import Record
from prge.objectives.examples import Example
from prge.objectives.policy_gradient import GRPO
from prge.training.estimators.differences import Antithetic, Differences
from prge.training.estimators.evolution import EvolutionStrategy
from prge.training.estimators.exact import Exact
from prge.training.estimators.policy_gradient import PolicyGradient
from prge.training.estimators.protocol import Estimator, Measurement, Step
from prge.training.estimators.rollouts import Rollout, reward_facts
from tests.numpy_engine import NumpyEngine, make_nonzero_adapter

PROMPTS = [Example(row, (TokenSequence((1, row)),), 0, None) for row in (1, 2)]


@dataclass
class GivenRollouts:
    """Implements RolloutSource with completions whose rewards are given, [adapters][prompts][count]."""

    rewards: Sequence[Sequence[Sequence[float]]]
    start: FloatArray = field(default_factory=lambda: np.zeros(33, np.float32))

    def sample(
        self, adapters: Sequence[Adapter], prompts: Sequence[Example], count: int, *, seed: int, step: int
    ) -> list[list[list[Rollout]]]:
        """See RolloutSource."""
        assert np.shape(self.rewards) == (len(adapters), len(prompts), count)
        return [
            [[Rollout((3, 4 + index), each) for index, each in enumerate(group)] for group in groups]
            for groups in self.rewards
        ]

    def step(self, step: int) -> Record | None:
        """See RolloutSource."""
        return None


def measured(estimator: Estimator, rollouts: GivenRollouts, beta: float = 0.0) -> Measurement:
    engine = NumpyEngine()
    adapter = make_nonzero_adapter(engine)
    step = Step(adapter, PROMPTS, 7, 0, objective=GRPO(beta=beta), rollouts=rollouts)
    return estimator.measure(engine, step)


def policy_gradient(estimator: Estimator, *, needs_reference: bool = False) -> PolicyGradient:
    return PolicyGradient(
        estimator,
        generations=2,
        iterations=1,
        max_length=4,
        loss_type="grpo",
        scale="group",
        needs_reference=needs_reference,
        compares_copies=isinstance(estimator, Differences),
    )


def test_rewards_solutions_and_lengths_are_recorded() -> None:
    facts = reward_facts([Rollout((1, 2, 3), 1.0), Rollout((1,), 0.0), Rollout((), 2.0)])
    assert facts.pop("reward_std") == pytest.approx(np.std([1, 0, 2]))
    assert facts == {
        "reward": 1.0,
        "solved": pytest.approx(2 / 3),
        "completion_tokens": 4,
        "completion_length": pytest.approx(4 / 3),
    }


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([[[1.0], [1.0]]] * 4, True),
        # All copies solve the same prompts: there is no difference between copies.
        ([[[1.0], [0.0]]] * 4, True),
        ([[[0.1 + 0.2], [0.3]], [[0.3], [0.1 + 0.2]]] * 2, True),
        # The copies of both pairs are equal.
        ([[[1.0], [1.0]], [[1.0], [0.0]]] * 2, True),
        ([*[[[1.0], [1.0]]] * 2, *[[[1.0], [0.0]]] * 2], False),
    ],
)
def test_copies_with_the_same_mean_reward_give_no_gradient(
    rewards: Sequence[Sequence[Sequence[float]]], equal: bool
) -> None:
    # The rewards of the copies with +z, then those with -z.
    estimator = EvolutionStrategy(Antithetic(2, 0.1), 0.0, "standardized")
    measurement = measured(estimator, GivenRollouts(rewards))
    assert measurement.facts.get("equal_rewards", False) is equal
    assert (not measurement.projected_gradients.any()) is equal


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [([[1.0, 1.0], [0.0, 0.0]], True), ([[0.5, 0.5], [0.5, 0.5]], True), ([[1.0, 0.0], [0.0, 0.0]], False)],
)
def test_prompts_whose_completions_have_the_same_reward_give_no_gradient(
    rewards: Sequence[Sequence[float]], equal: bool
) -> None:
    measurement = measured(policy_gradient(Exact()), GivenRollouts([rewards]))
    assert measurement.facts.get("equal_rewards", False) is equal
    assert measurement.gradient is not None and (not measurement.gradient.any()) is equal


def log_probability(engine: NumpyEngine, values: FloatArray, token: int, after: int) -> float:
    update = engine.lora_a.T @ values.reshape(3, 11).astype(np.float64)
    logits = (engine.weight + update).T @ engine.embedding[after]
    return float(logits[token] - np.log(np.exp(logits).sum()))


@pytest.mark.parametrize("estimator", [Exact(), Differences(Antithetic(2, 0.1))])
def test_the_divergence_from_the_start_is_the_mean_over_tokens(estimator: Estimator) -> None:
    rollouts = GivenRollouts([[[1.0, 0.0], [0.0, 1.0]]])
    measurement = measured(policy_gradient(estimator, needs_reference=True), rollouts, beta=0.1)
    engine = NumpyEngine()
    now = make_nonzero_adapter(engine).values
    # Tokens of all completions, with the token before.
    tokens = [(3, 1), (4, 3), (3, 1), (5, 3), (3, 2), (4, 3), (3, 2), (5, 3)]
    differences = [
        log_probability(engine, rollouts.start, *each) - log_probability(engine, now, *each)
        for each in tokens
    ]
    expected = np.mean([np.exp(each) - each - 1 for each in differences])
    assert measurement.facts["kl"] == pytest.approx(expected, rel=1e-6) and expected > 0


def test_without_a_reference_there_is_no_divergence() -> None:
    measurement = measured(policy_gradient(Exact()), GivenRollouts([[[1.0, 0.0], [0.0, 1.0]]]))
    assert "kl" not in measurement.facts
