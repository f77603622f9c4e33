"""Policy gradients of sampled completions: GRPO (Shao et al. 2024, arXiv 2402.03300) and its variants.

    completions of a prompt -> rewards -> advantages -> a loss for every token

A completion is an example in which every token is a candidate of its own, so that the score of a candidate is
the log-probability of its token. Names are those of TRL's GRPOConfig.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from prge.engine import Float64Array, Target, TokenSequence
from prge.objectives.examples import Example

LossType = Literal["grpo", "bnpo", "dr_grpo"]
RewardScale = Literal["group", "batch", "none"]
# Added to standard deviations of rewards.
_SMALL = 1e-4


@dataclass(frozen=True, slots=True)
class CompletionExample(Example):
    """A sampled completion.

    Attributes:
        advantage: how much better its reward is than that of other completions of its prompt.
        sampled: log-probabilities of its tokens by the adapter that sampled them; empty: by the adapter whose
            scores are given, which sampled them itself.
    """

    advantage: float = 0.0
    sampled: tuple[float, ...] = ()


@dataclass(frozen=True)
class GRPO:
    """Implements Objective with the clipped surrogate loss of completions, summed over their tokens.

    Attributes:
        clip_range: how far the probability of a token may move from that by which it was sampled, as a share;
            beyond that, its gradient is zero.
        beta: factor of the Kullback-Leibler divergence from the adapter that the run starts from.
    """

    clip_range: float = 0.2
    beta: float = 0.0
    is_separable: ClassVar = True

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        losses: Float64Array = self._token_losses(scores, examples)[0].sum(-1)
        return losses

    def gradients(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        return self._token_losses(scores, examples)[1]

    def _token_losses(
        self, scores: Float64Array, examples: Sequence[Example]
    ) -> tuple[Float64Array, Float64Array]:
        """Return the loss of every token and its derivative, both f64 in the shape of the scores.

        A token's loss is -min(r A, clip(r) A) + beta (exp(d) - d - 1), with the advantage A, the ratio r of
        its probabilities now and when it was sampled, and the difference d of its log-probabilities by the
        start adapter and now. Both are 0 after the last token.
        """
        losses, gradients = np.zeros(scores.shape), np.zeros(scores.shape)
        for index, example in enumerate(examples):
            assert isinstance(example, CompletionExample)
            now = scores[:, index, : example.candidates]
            change = now - np.array(example.sampled) if example.sampled else np.zeros(now.shape)
            loss, gradient = clipped_surrogate(change, example.advantage, self.clip_range)
            if self.beta:
                divergence, derivative = divergence_from_start(now - np.array(example.reference))
                loss, gradient = loss + self.beta * divergence, gradient + self.beta * derivative
            losses[:, index, : example.candidates] = loss
            gradients[:, index, : example.candidates] = gradient
        return losses, gradients


def clipped_surrogate(
    change: Float64Array, advantages: Float64Array | float, clip_range: float
) -> tuple[Float64Array, Float64Array]:
    """Return PPO's losses -min(r A, clip(r) A), and their derivatives by the log-probabilities now.

    Args:
        change: log of r, the log-probabilities now minus those when tokens or answers were sampled.
        advantages: A, in the shape of `change` or for all of it.
        clip_range: r is clipped to 1 - clip_range and 1 + clip_range.
    """
    ratio = np.exp(change)
    gain = ratio * advantages
    clipped = np.clip(ratio, 1 - clip_range, 1 + clip_range) * advantages
    return -np.minimum(gain, clipped), np.where(gain <= clipped, -gain, 0.0)


def divergence_from_start(change: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return an estimate of the Kullback-Leibler divergence from the start adapter, and its derivative.

    The estimate is exp(-c) - 1 + c. It has no bias, and is never negative (Schulman's k3, as in TRL's metric
    `kl`).

    Args:
        change: c, the log-probabilities now minus those by the adapter that the run starts from.
    """
    return np.expm1(-change) + change, -np.expm1(-change)


def completion_example(row: int, prompt: Sequence[int], completion: Sequence[int]) -> CompletionExample:
    """Return the example of a completion's tokens, each of which is a target and a candidate."""
    first = len(prompt) - 1
    targets = tuple(Target(first + index, token, 1.0, index) for index, token in enumerate(completion))
    # The last token predicts nothing.
    sequence = TokenSequence((*prompt, *completion[:-1]), targets)
    return CompletionExample(row, (sequence,), len(completion), None)


def loss_weights(lengths: Sequence[int], loss_type: LossType, max_length: int) -> Float64Array:
    """Return the weights with which the mean of the losses is the loss of a step, f64 [completions].

    Args:
        lengths: numbers of tokens of the completions.
        loss_type: grpo: the mean of each completion's mean; bnpo: the mean over all tokens; dr_grpo: the sum
            over tokens divided by `max_length`, so that no length is preferred (Liu et al. 2025, arXiv
            2503.20783).
        max_length: maximum number of tokens of a completion.
    """
    tokens = np.array(lengths, np.float64)
    if loss_type == "grpo":
        return 1 / tokens
    return np.full(len(tokens), 1 / (tokens.mean() if loss_type == "bnpo" else max_length))


def advantages(rewards: Float64Array, scale: RewardScale) -> Float64Array:
    """Return rewards minus the mean of their group, f64 [prompts, completions].

    Args:
        rewards: the rewards of each prompt's completions, f64 [prompts, completions].
        scale: divide by the standard deviation of the group, or of the batch, or by nothing (Dr. GRPO).
    """
    centered: Float64Array = rewards - rewards.mean(-1, keepdims=True)
    if scale == "none":
        return centered
    spread = rewards.std(-1, ddof=1, keepdims=True) if scale == "group" else rewards.std(ddof=1)
    scaled: Float64Array = centered / (spread + _SMALL)
    return scaled
