"""Policy gradients of sampled completions: GRPO (Shao et al. 2024, arXiv 2402.03300) and its variants.

    completions of a prompt -> rewards -> advantages -> a loss for every token

A completion is an example in which every token is a candidate of its own, so that the score of a candidate is
the log-probability of its token. Names and defaults are those of TRL's GRPOConfig.
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
            advantage = example.advantage
            ratio = np.exp(now - np.array(example.sampled)) if example.sampled else np.ones(now.shape)
            gain = ratio * advantage
            clipped = np.clip(ratio, 1 - self.clip_range, 1 + self.clip_range) * advantage
            loss, gradient = -np.minimum(gain, clipped), np.where(gain <= clipped, -gain, 0.0)
            if self.beta:
                difference = np.array(example.reference) - now
                loss += self.beta * (np.expm1(difference) - difference)
                gradient += self.beta * -np.expm1(difference)
            losses[:, index, : example.candidates] = loss
            gradients[:, index, : example.candidates] = gradient
        return losses, gradients


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
