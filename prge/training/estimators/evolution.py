"""Evolution strategies: gradients of the expected reward from completions of perturbed adapters.

    perturbations +-eps z_i -> completions of the same prompts -> rewards -> projected gradients

This is P-RGE's estimate with the negative reward as the loss, for which nothing has to be differentiable
(Salimans et al. 2017, arXiv 1703.03864; for language models arXiv 2509.24372). All copies of a step write in
one batch, with the same random numbers.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from prge.engine import Engine, Float64Array
from prge.formats.adapter import Adapter
from prge.training.estimators.differences import Differences, FiniteDifference, perturb_adapter
from prge.training.estimators.directions import DirectionSampler
from prge.training.estimators.protocol import Measurement, Step, clip_by_rms
from prge.training.estimators.rollouts import EQUAL_REWARDS, reward_facts

RewardShaping = Literal["standardized", "ranked", "none"]


class EvolutionStrategy(Differences):
    """Implements protocol.Estimator with rewards of perturbed adapters.

    Args:
        rule: the finite-difference formula.
        max_grad_norm: upper bound for the root mean square of the projected gradients; 0: no clipping.
        shaping: see `shape_rewards`.
    """

    def __init__(self, rule: FiniteDifference, max_grad_norm: float, shaping: RewardShaping) -> None:
        super().__init__(rule, max_grad_norm)
        self.shaping = shaping

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Measure the mean reward of every perturbed copy."""
        directions = DirectionSampler(step.seed, step.number, step.adapter.size)
        adapters = [
            Adapter(step.adapter.modules, perturb_adapter(step.adapter, perturbation, directions))
            for perturbation in self.rule.perturbations()
        ]
        completions = step.rollout_source.sample(adapters, step.examples, 1, seed=step.seed, step=step.number)
        rollouts = [[rollout for group in copy for rollout in group] for copy in completions]
        rewards = np.array([[rollout.reward for rollout in copy] for copy in rollouts])
        # Exactly rounded sums: copies with the same rewards in another order don't differ.
        means = np.array([math.fsum(copy) / len(copy) for copy in rewards])
        gradients = self.rule.projected_gradients(-shape_rewards(means, self.shaping))
        facts = reward_facts([rollout for copy in rollouts for rollout in copy])
        if not gradients.any():
            facts[EQUAL_REWARDS] = True
        return Measurement(
            -float(rewards.mean()),
            clip_by_rms(gradients, self.max_grad_norm),
            None,
            0.0,
            facts=facts,
        )


def shape_rewards(rewards: Float64Array, shaping: RewardShaping) -> Float64Array:
    """Return the rewards of the copies on the scale of an estimate, f64 [copies].

    Args:
        rewards: mean reward of each copy, f64 [copies].
        shaping: standardized: in units of their standard deviation, as in arXiv 2509.24372; ranked: ranks
            from -0.5 to 0.5, as in arXiv 1703.03864, where equal rewards have their mean rank; none: as they
            are. Equal rewards become zeros unless it is none.
    """
    if shaping == "none":
        return rewards
    if shaping == "ranked":
        below = (rewards[None] < rewards[:, None]).sum(-1) + 0.5 * (rewards[None] == rewards[:, None]).sum(-1)
        ranks: Float64Array = (below - 0.5) / (len(rewards) - 1) - 0.5
        return ranks
    if np.ptp(rewards) == 0:  # their mean may differ by rounding
        return np.zeros_like(rewards)
    scaled = (rewards - rewards.mean()) / np.ptp(rewards)  # squares of tiny rewards would be 0
    standardized: Float64Array = scaled / scaled.std()
    return standardized
