"""The completions that a reward scores: how estimators that learn from a reward get them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prge.engine import FloatArray
from prge.formats.adapter import Adapter
from prge.formats.journal import Record
from prge.objectives.examples import Example

# Completions that are generated at once.
ROLLOUT_SLOTS = 16
# A completion with at least this reward solves its prompt.
SOLVED = 1.0
# Fields of a step's record: mean and standard deviation of the rewards, share of completions that solve their
# prompts, the number of their tokens, and their mean length in tokens.
REWARD_FACTS = ("reward", "reward_std", "solved", "completion_tokens", "completion_length")
# Field of the record of a step from whose rewards nothing can be learned: those that it compares are equal.
EQUAL_REWARDS = "equal_rewards"
# Field with the Kullback-Leibler divergence from the adapter that the run starts from, in nats per token.
DIVERGENCE = "kl"


@dataclass(frozen=True)
class Rollout:
    """A completion of a prompt, with its reward.

    Attributes:
        tokens: the generated tokens, with the end token if there was one.
        reward: its reward.
    """

    tokens: tuple[int, ...]
    reward: float


class RolloutSource(Protocol):
    """Generates completions of prompts and computes their rewards."""

    @property
    def start(self) -> FloatArray:
        """Values of the adapter that the run starts from, f32 [size]."""
        ...

    def sample(
        self, adapters: Sequence[Adapter], prompts: Sequence[Example], count: int, *, seed: int, step: int
    ) -> list[list[list[Rollout]]]:
        """Return `count` completions by each adapter of each prompt, [adapters][prompts][count].

        All adapters sample with the same random numbers, which depend on seed, step and prompt (common random
        numbers).

        Raises:
            RewardError: the reward of a completion can't be computed.
            EngineError: the engine failed.
        """
        ...

    def step(self, step: int) -> Record | None:
        """Return the journal's record of a step; None if it has none."""
        ...


def reward_facts(rollouts: Sequence[Rollout]) -> Record:
    """Return the fields of a step's record that describe its completions."""
    rewards = [each.reward for each in rollouts]
    mean = sum(rewards) / len(rewards)
    tokens = sum(len(each.tokens) for each in rollouts)
    facts = (
        mean,
        (sum((each - mean) ** 2 for each in rewards) / len(rewards)) ** 0.5,
        sum(each >= SOLVED for each in rewards) / len(rewards),
        tokens,
        tokens / len(rollouts),
    )
    return dict(zip(REWARD_FACTS, facts, strict=True))
