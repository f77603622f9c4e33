"""Settings of learning from a reward, and the estimators that do: `es` and `grpo`.

es      evolution strategies: rewards of completions by perturbed adapters (evolution.py)
grpo    policy gradients: completions by the adapter itself, and the gradient of their loss
        (policy_gradient.py)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

from prge.cli.bounds import flag
from prge.objectives.policy_gradient import LossType, RewardScale
from prge.objectives.preferences import ObjectiveFlags, ObjectiveName
from prge.training.estimators.differences import Differences
from prge.training.estimators.evolution import EvolutionStrategy, RewardShaping
from prge.training.estimators.policy_gradient import PolicyGradient
from prge.training.estimators.protocol import Estimator

REWARD_OBJECTIVES: Collection[ObjectiveName] = ("es", "grpo")


@dataclass(frozen=True, kw_only=True)
class RewardFlags:
    """Learning from a reward of generated text."""

    max_completion_length: int = 64
    """Maximum number of tokens of a completion."""
    temperature: float = 1.0
    """Temperature of sampling completions; development prompts are completed with the most likely tokens."""
    num_generations: int = 8
    """grpo: completions of each prompt, which are compared with each other."""
    num_iterations: int = 1
    """grpo: steps that use the same completions."""
    clip_range: float = 0.2
    """grpo: a token's probability may move by this share from that by which it was sampled before its
    gradient becomes zero. Has an effect with several --num-iterations."""
    loss_type: LossType = "grpo"
    """grpo: mean over each completion's tokens, then over completions; bnpo: mean over all tokens; dr_grpo:
    sum over tokens, divided by --max-completion-length."""
    scale_rewards: RewardScale = "group"
    """grpo: divide advantages by the standard deviation of the rewards of a prompt's completions, or of all
    completions of the step; none: don't divide (Dr. GRPO)."""
    reward_shaping: RewardShaping = "standardized"
    """es: mean rewards of the copies in units of their standard deviation; ranked: their ranks, which ignores
    outliers; none: as they are."""


def reward_problems(
    settings: RewardFlags, reward: str | None, objectives: ObjectiveFlags, task: str | None
) -> list[str]:
    """Return the problems of settings with a reward, or of settings that need one.

    Args:
        settings: settings of learning from a reward.
        reward: the reward that the user names; None: none.
        objectives: settings of the objective.
        task: the task that the user names.
    """
    objective = objectives.objective
    if reward is None:
        problems = [
            f"{flag(each.name)} is for --reward, which isn't given"
            for each in fields(RewardFlags)
            if getattr(settings, each.name) != each.default
        ]
        if objective == "es":
            problems.append("--objective is es, which needs a --reward")
        return problems
    problems = []
    if objective not in ("auto", *REWARD_OBJECTIVES):
        problems.append(
            f"--reward with --objective {objective}, which learns from answers: set only one of them"
        )
    if objectives.loss_normalisation == "token":
        problems.append(
            "--loss-normalisation token is for answers in rows, not for --reward; there --loss-type bnpo is "
            "the mean over all tokens"
        )
    if task is not None:
        problems.append(
            f"--task is {task}, but --reward learns from completions of prompts, and reads all columns of a "
            "row: leave --task out"
        )
    return problems


def reward_estimator(
    estimator: Estimator, objective: ObjectiveName, beta: float | None, settings: RewardFlags
) -> Estimator:
    """Return the estimator of an objective that learns from a reward, based on another estimator.

    For other objectives, it is that estimator itself. `beta` is the factor of the divergence from the start.
    """
    if objective == "es":
        if not isinstance(estimator, Differences):
            raise ValueError("evolution strategies compare perturbed adapters")
        return EvolutionStrategy(estimator.rule, estimator.max_grad_norm, settings.reward_shaping)
    if objective == "grpo":
        return PolicyGradient(
            estimator,
            generations=settings.num_generations,
            iterations=settings.num_iterations,
            max_length=settings.max_completion_length,
            loss_type=settings.loss_type,
            scale=settings.scale_rewards,
            needs_reference=bool(beta),
            compares_copies=isinstance(estimator, Differences),
        )
    return estimator
