"""GRPO's loss, advantages and gradients, against torch's autograd in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prge.objectives.objective import Loss
from prge.objectives.policy_gradient import (
    GRPO,
    CompletionExample,
    LossType,
    advantages,
    completion_example,
    loss_weights,
)

RANDOM = np.random.default_rng(0)
LENGTHS = (3, 1, 4)


def completions(moved: float = 0.5) -> list[CompletionExample]:
    """Return completions whose tokens were sampled with other log-probabilities, `moved` away on average."""
    return [
        replace(
            completion_example(row, [1, 2], [*range(3, 3 + length)]),
            advantage=advantage,
            weight=1 / length,
            sampled=tuple(RANDOM.normal(-2, moved, length).tolist()),
            reference=tuple(RANDOM.normal(-2, 0.4, length).tolist()),
        )
        for row, (length, advantage) in enumerate(zip(LENGTHS, (1.5, -0.7, 0.2), strict=True), 1)
    ]


def torch_losses(outputs: torch.Tensor, examples: list[CompletionExample], grpo: GRPO) -> torch.Tensor:
    """Return the weighted loss of every example, from the formula of arXiv 2402.03300."""
    losses, start = [], 0
    for example in examples:
        now = outputs[start : start + example.candidates]
        start += example.candidates
        ratio = torch.exp(now - torch.tensor(example.sampled, dtype=torch.float64))
        clipped = ratio.clamp(1 - grpo.clip_range, 1 + grpo.clip_range)
        difference = torch.tensor(example.reference, dtype=torch.float64) - now
        divergence = torch.exp(difference) - difference - 1
        surrogate = torch.min(ratio * example.advantage, clipped * example.advantage)
        losses.append(example.weight * (grpo.beta * divergence - surrogate).sum())
    return torch.stack(losses)


def test_every_token_of_a_completion_is_a_target() -> None:
    example = completion_example(7, [5, 6, 7], [8, 9])
    (sequence,) = example.sequences
    assert sequence.tokens == (5, 6, 7, 8) and example.candidates == 2
    assert [(target.position, target.token, target.candidate) for target in sequence.targets] == [
        (2, 8, 0),
        (3, 9, 1),
    ]


@pytest.mark.parametrize("grpo", [GRPO(), GRPO(0.1, 0.3)], ids=["clipped", "with a divergence"])
def test_losses_and_gradients_are_those_of_autograd(grpo: GRPO) -> None:
    examples = completions()
    outputs = torch.tensor(RANDOM.normal(-2, 0.4, sum(LENGTHS)), requires_grad=True)
    expected = torch_losses(outputs, examples, grpo)
    expected.sum().backward()
    loss = Loss(examples, outputs.detach().numpy()[None], grpo)
    np.testing.assert_allclose(loss.losses[0], expected.detach(), rtol=1e-12)
    np.testing.assert_allclose(loss.grad_outputs, outputs.grad, rtol=1e-12)


def test_without_sampled_probabilities_the_ratio_is_one() -> None:
    examples = [replace(each, sampled=()) for each in completions()]
    outputs = RANDOM.normal(-2, 0.4, (1, sum(LENGTHS)))
    loss = Loss(examples, outputs, GRPO())
    assert loss.losses[0] == pytest.approx([-each.advantage for each in examples])
    weights = [-each.advantage * each.weight for each in examples for _ in range(each.candidates)]
    assert loss.grad_outputs == pytest.approx(weights)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4))
def test_advantages_of_a_group_are_centered(rewards: list[list[float]]) -> None:
    values = np.array(rewards)
    for scale in ("group", "batch", "none"):
        gains = advantages(values, scale)  # type: ignore[arg-type]
        np.testing.assert_allclose(gains.mean(-1), 0, atol=1e-9)
        assert np.isfinite(gains).all()


def test_advantages_are_in_units_of_a_deviation() -> None:
    rewards = np.array([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0]])
    np.testing.assert_allclose(advantages(rewards, "group"), [[-1, 0, 1], [0, 0, 0]], atol=2e-4)
    np.testing.assert_allclose(advantages(rewards, "none"), [[-1, 0, 1], [0, 0, 0]])
    deviation = rewards.std(ddof=1)
    np.testing.assert_allclose(advantages(rewards, "batch")[0], [-1 / deviation, 0, 1 / deviation], rtol=1e-3)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [("grpo", (2 / 2 + 5 / 5) / 2), ("bnpo", 7 / 7), ("dr_grpo", 7 / (2 * 10))],
)
def test_weights_average_over_completions_tokens_or_the_maximum(loss_type: LossType, expected: float) -> None:
    lengths = np.array([2, 5])
    weights = loss_weights([2, 5], loss_type, 10)
    assert (weights * lengths).mean() == pytest.approx(expected)
