"""The Reward protocol: a number for a generated text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from prge.errors import RewardError, format_value

# Seconds that the reward of a completion may take, and loading a file with a function.
MAX_SECONDS = 30.0
# Largest absolute reward: its square must be a number, too.
_LARGEST = 1e100


class Reward(Protocol):
    """A reward of completions."""

    def __call__(self, prompt: Any, completion: str, row: Mapping[str, Any]) -> float:
        """Return the reward of a completion; higher is better, and at least 1 solves the prompt.

        Args:
            prompt: the prompt as its row has it, a text or a list of messages.
            completion: the generated text.
            row: all columns of the prompt's row.

        Raises:
            RewardError: the reward can't be computed.
        """
        ...

    def close(self) -> None:
        """Free what the reward holds, such as a process."""
        ...


def check_reward(value: object) -> float:
    """Return a reward as a number; raises RewardError unless it is finite and its square is finite, too."""
    if not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise RewardError(
            f"The reward is {format_value(value)}, must be a finite number of at most {_LARGEST:g}.",
            remedy="Correct the reward function.",
            code="reward-not-finite",
        )
    return float(value)
