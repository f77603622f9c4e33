"""Scores, losses and their derivative, against torch's autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prge.formats.adapter import Adapter
from prge.objectives.classification_head import CrossFittedHeads, Head
from prge.objectives.examples import Example, labels_of, target_count
from prge.objectives.objective import CROSS_ENTROPY, Loss
from prge.objectives.scoring import score
from prge.training.estimators.differences import Antithetic, Differences
from prge.training.estimators.exact import Exact
from prge.training.estimators.protocol import Estimator, Step
from prge.training.estimators.tangents import TangentEstimator
from prge.training.sampler import Sampler
from tests.numpy_engine import NumpyEngine
from tests.rows import choice, classification, completion, long_choice


def test_completion_loss_is_the_mean_negative_log_likelihood() -> None:
    examples = [completion(1, [1, 2, 3, 4], 2), completion(2, [5, 6], 1)]
    logprobs = -np.array([[0, 1, 4], [12, 13, 16]], np.float32)
    np.testing.assert_allclose(Loss(examples, logprobs).losses, [[0.5, 4], [12.5, 16]])


def test_candidate_loss_is_cross_entropy_over_the_candidates_alone() -> None:
    examples = [choice(1, [1, 2], [7, 8, 9], 2), choice(2, [3], [7, 8], 0)]
    logprobs = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32) - 5
    result = Loss(examples, logprobs).losses
    by_hand = torch.tensor(logprobs).double()
    for copy in range(2):
        three, two = by_hand[copy, :3], by_hand[copy, 3:]
        expected = [
            torch.nn.functional.cross_entropy(three, torch.tensor(2)),
            torch.nn.functional.cross_entropy(two, torch.tensor(0)),
        ]
        np.testing.assert_allclose(result[copy], expected, rtol=1e-12)


def test_the_vocabulary_normalizer_cancels() -> None:
    examples = [choice(1, [1], [7, 8], 1)]
    logprobs = np.array([[-1.0, -2.0]], np.float32)
    first = Loss(examples, logprobs).losses
    second = Loss(examples, logprobs - 3).losses
    np.testing.assert_allclose(first, second, rtol=1e-12)


def test_longer_candidates_score_their_mean_token() -> None:
    examples = [long_choice(1, [1, 2], [[3], [4, 5, 6]], 1)]
    logprobs = np.array([[-1, -2, -4, -6]], np.float32)
    np.testing.assert_allclose(Loss(examples, logprobs).scores, [[[-1, -4]]])


def test_an_example_with_fewer_candidates_has_scores_of_minus_infinity_after_them() -> None:
    examples = [choice(1, [1], [7, 8, 9], 2), completion(2, [1, 2, 3], 1)]
    result = Loss(examples, np.array([[-1, -2, -3, -4, -6]], np.float32))
    np.testing.assert_array_equal(result.scores, [[[-1, -2, -3], [-5, -np.inf, -np.inf]]])
    assert np.isfinite(result.losses).all() and not result.grad_scores[0, 1, 1:].any()


def test_derivative_by_scores_matches_autograd() -> None:
    table = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    examples = [choice(row, [1], [1, 2, 3, 4, 5], label) for row, label in ((1, 0), (2, 4), (3, 2))]
    examples.append(completion(4, [1, 2], 1))
    table.requires_grad_(True)
    chosen = torch.tensor([0, 4, 2])
    loss = (
        torch.nn.functional.cross_entropy(table[:, :3].reshape(-1, 5), chosen.repeat(3), reduction="sum")
        - table[:, 3, 0].sum()
    )
    loss.backward()
    scores = table.detach().numpy()
    np.testing.assert_allclose(CROSS_ENTROPY.losses(scores, examples).sum(), loss.item(), rtol=1e-12)
    np.testing.assert_allclose(CROSS_ENTROPY.gradients(scores, examples), table.grad, atol=1e-12)


def test_head_gradient_matches_autograd() -> None:
    random = np.random.default_rng(1)
    pooled = random.normal(size=(2, 5, 6)).astype(np.float32)
    labels = np.array([0, 2, 1, 1, 0])
    examples = [classification(row, [row], 3, int(label)) for row, label in enumerate(labels, 1)]
    head = Head(3, 6)
    head.values[:] = random.normal(size=head.size)
    result = Loss(examples, pooled, head=head).head_gradient(head)
    weight = torch.tensor(head.weight, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(head.bias, dtype=torch.float64, requires_grad=True)
    answers = torch.tensor(pooled, dtype=torch.float64) @ weight.T + bias
    torch.nn.functional.cross_entropy(
        answers.reshape(-1, 3), torch.tensor(labels).repeat(2), reduction="sum"
    ).backward()
    assert weight.grad is not None and bias.grad is not None
    np.testing.assert_allclose(result, np.concatenate([weight.grad.ravel(), bias.grad]), rtol=1e-9)


MIXED = [
    completion(1, [1, 2, 3], 1),
    choice(2, [3], [7, 8], 0),
    long_choice(3, [1], [[3], [4, 5, 6]], 1),
]


@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("folds", [1, 2])
def test_the_chain_rule_between_outputs_and_losses(encoder: bool, folds: int) -> None:
    """Gradients of the outputs and derivatives along directions equal central differences of the losses."""
    random = np.random.default_rng(0)
    examples = [classification(row, [row], 3, row % 3) for row in (1, 2, 3)] if encoder else MIXED
    heads = [Head(3, 6) for _ in range(folds)]
    for each in heads:
        each.values[:] = random.normal(size=each.size)
    head = (CrossFittedHeads(heads) if folds > 1 else heads[0]) if encoder else None
    outputs = random.normal(size=(1, *((3, 6) if encoder else (8,))))
    along = random.normal(size=(5, *outputs.shape[1:]))
    loss = Loss(examples, outputs, head=head)
    length = 1e-5
    above, below = (
        [replace(loss, outputs=outputs + scale * direction).losses[0] for direction in along]
        for scale in (length, -length)
    )
    expected = (np.stack(above) - np.stack(below)) / (2 * length)
    np.testing.assert_allclose(loss.jvp(along), expected, atol=1e-8)
    assert loss.grad_outputs.shape == outputs.shape[1:]
    whole = (loss.grad_outputs * along).reshape(5, -1).sum(1)
    np.testing.assert_allclose(whole, expected.sum(1), atol=1e-8)


# Examples with different numbers of sequences, which have different numbers of targets.
RAGGED = [
    replace(completion(1, [1, 2, 3, 4, 5, 6], 2), weight=0.5),
    long_choice(2, [1], [[3], [4, 5, 6], [7, 8]], 1),
    choice(3, [3, 1], [7, 8, 9, 2], 3),
    replace(long_choice(4, [2, 2], [[3, 1, 1], [4]], 0), weight=3.0),
    completion(5, [9, 1], 1),
]


def by_torch(logprobs: torch.Tensor, examples: Sequence[Example]) -> torch.Tensor:
    """Return the losses of one copy, computed target by target."""
    left, losses = iter(logprobs), []
    for example in examples:
        scores = [torch.zeros((), dtype=torch.float64)] * example.candidates
        for sequence in example.sequences:
            for target in sequence.targets:
                scores[target.candidate] = scores[target.candidate] + target.weight * next(left)
        if example.label is None:
            loss = -scores[0]
        else:
            loss = torch.nn.functional.cross_entropy(torch.stack(scores), torch.tensor(example.label))
        losses.append(example.weight * loss)
    assert next(left, None) is None
    return torch.stack(losses)


@settings(max_examples=50)
@given(st.lists(st.sampled_from(RAGGED), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_losses_of_ragged_examples_match_autograd(examples: list[Example], seed: int) -> None:
    random = np.random.default_rng(seed)
    outputs = random.normal(-3, 2, (3, target_count(examples)))
    result = Loss(examples, outputs)
    assert result.losses.shape == (3, len(examples))
    for copy, losses in zip(outputs, result.losses, strict=True):
        np.testing.assert_allclose(losses, by_torch(torch.tensor(copy), examples), rtol=1e-12)

    alone = Loss(examples, outputs[:1])
    logprobs = torch.tensor(outputs[0], requires_grad=True)
    by_torch(logprobs, examples).sum().backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(alone.grad_outputs, logprobs.grad, rtol=1e-9, atol=1e-13)

    jacobian = torch.autograd.functional.jacobian(lambda given: by_torch(given, examples), logprobs)
    directions = random.normal(size=(4, outputs.shape[1]))
    expected = directions @ jacobian.numpy().T
    np.testing.assert_allclose(alone.jvp(directions), expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_losses_of_an_encoder_match_autograd(rows: list[int], seed: int) -> None:
    """The states of each example are scored by its head."""
    random = np.random.default_rng(seed)
    examples = [replace(classification(row, [row], 3, row % 3), weight=row / 2) for row in rows]
    heads = [Head(3, 6) for _ in range(2)]
    for head in heads:
        head.values[:] = random.normal(size=head.size)
    pooled = random.normal(size=(1, len(rows), 6))
    states = torch.tensor(pooled[0], requires_grad=True)
    losses = []
    for example, state in zip(examples, states, strict=True):
        head = heads[example.row % 2]
        scores = torch.tensor(head.weight).double() @ state + torch.tensor(head.bias).double()
        cross_entropy = torch.nn.functional.cross_entropy(scores, torch.tensor(example.label))
        losses.append(example.weight * cross_entropy)
    torch.stack(losses).sum().backward()
    assert states.grad is not None
    result = Loss(examples, pooled, head=CrossFittedHeads(heads))
    np.testing.assert_allclose(result.losses[0], torch.stack(losses).detach(), rtol=1e-9)
    np.testing.assert_allclose(result.grad_outputs, states.grad, rtol=1e-9, atol=1e-12)


PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/extend.md"


def margin() -> Any:
    """Return the loss of docs/how-to/extend.md."""
    code = PAGE.read_text(encoding="utf-8").split("class Margin:")[1].split("\n\n\n")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    page: dict[str, Any] = {"np": np, "labels_of": labels_of}
    exec(f"class Margin:{code}", page)
    return page["Margin"]()


@pytest.mark.parametrize("name", ["differences", "tangents", "exact"])
def test_a_custom_loss_can_be_trained_with_every_estimator(name: str) -> None:
    rows = [choice(row, [row % 7, row % 5], [1, 3, 8], row % 3) for row in range(1, 25)]
    engine = NumpyEngine()
    estimators: dict[str, Estimator] = {
        "differences": Differences(Antithetic(8, 1e-3)),
        "tangents": TangentEstimator(8),
        "exact": Exact(),
    }
    estimator = estimators[name]
    adapter = Adapter.zeros(engine.model.modules)
    sampler, objective = Sampler(rows, 6, 1), margin()

    def loss() -> float:
        return score(engine, adapter, rows, objective=objective).loss

    before = loss()
    for number in range(60):
        step = Step(adapter, sampler.batch(number), 1, number, objective=objective)
        fields = estimator.measure(engine, step).journal_fields
        adapter.values -= 0.1 * estimator.gradient(fields, 1, number, adapter.modules)
    assert loss() < 0.6 * before
