"""Scores, losses and their derivative, against torch's autograd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prge.files.adapter import Adapter
from prge.learning.estimators.differences import Antithetic, Differences
from prge.learning.estimators.exact import Exact
from prge.learning.estimators.protocol import Estimator, Step
from prge.learning.estimators.tangents import Tangents
from prge.learning.evaluation import score
from prge.learning.examples import labels_of, make_batch
from prge.learning.head import CrossFittedHeads, Head
from prge.learning.objectives import CROSS_ENTROPY, BatchLoss
from prge.learning.sampling import Sampler
from tests.numpy_engine import NumpyEngine
from tests.rows import choice, classified, completion, long_choice


def test_completion_loss_is_the_mean_negative_log_likelihood() -> None:
    contract = NumpyEngine(batch_size=3).contract
    batch = make_batch([completion(1, [1, 2, 3, 4], 2), completion(2, [5, 6], 1)], contract)
    logprobs = -np.arange(2 * 3 * 4, dtype=np.float32).reshape(6, 4)
    found = BatchLoss(batch, logprobs, copies=2).losses
    np.testing.assert_allclose(found, [[0.5, 4], [12.5, 16]])


def test_candidate_loss_is_cross_entropy_over_the_candidates_alone() -> None:
    contract = NumpyEngine(batch_size=2).contract
    batch = make_batch([choice(1, [1, 2], [7, 8, 9], 2), choice(2, [3], [7, 8], 0)], contract)
    logprobs = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32) - 5
    found = BatchLoss(batch, logprobs, copies=2).losses
    by_hand = torch.tensor(logprobs).double().reshape(2, 2, 4)
    for copy in range(2):
        three, two = by_hand[copy, 0, :3], by_hand[copy, 1, :2]
        expected = [
            torch.nn.functional.cross_entropy(three, torch.tensor(2)),
            torch.nn.functional.cross_entropy(two, torch.tensor(0)),
        ]
        np.testing.assert_allclose(found[copy], expected, rtol=1e-12)


def test_the_vocabulary_normalizer_cancels() -> None:
    contract = NumpyEngine(batch_size=1).contract
    batch = make_batch([choice(1, [1], [7, 8], 1)], contract)
    logprobs = np.array([[-1.0, -2.0, 0, 0]], np.float32)
    first = BatchLoss(batch, logprobs).losses
    second = BatchLoss(batch, logprobs - 3).losses
    np.testing.assert_allclose(first, second, rtol=1e-12)


def test_longer_candidates_score_their_mean_token() -> None:
    contract = NumpyEngine(batch_size=4).contract
    batch = make_batch([long_choice(1, [1, 2], [[3], [4, 5, 6]], 1)], contract)
    logprobs = np.array([[-1, 0, 0, 0], [-2, -4, -6, 0], [9, 9, 9, 9], [9, 9, 9, 9]], np.float32)
    found = BatchLoss(batch, logprobs).scores
    np.testing.assert_allclose(found, [[[-1, -4]]])


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
    np.testing.assert_allclose(CROSS_ENTROPY.slopes(scores, examples), table.grad, atol=1e-12)


def test_head_gradient_matches_autograd() -> None:
    random = np.random.default_rng(1)
    pooled = random.normal(size=(2, 5, 6)).astype(np.float32)
    labels = np.array([0, 2, 1, 1, 0])
    examples = [classified(row, [row], 3, int(label)) for row, label in enumerate(labels, 1)]
    batch = make_batch(examples, NumpyEngine(batch_size=5, encoder=True).contract)
    head = Head(3, 6)
    head.values[:] = random.normal(size=head.size)
    found = BatchLoss(batch, pooled.reshape(10, 6), head=head, copies=2).by_head(head)
    weight = torch.tensor(head.weight, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(head.bias, dtype=torch.float64, requires_grad=True)
    answers = torch.tensor(pooled, dtype=torch.float64) @ weight.T + bias
    torch.nn.functional.cross_entropy(
        answers.reshape(-1, 3), torch.tensor(labels).repeat(2), reduction="sum"
    ).backward()
    assert weight.grad is not None and bias.grad is not None
    np.testing.assert_allclose(found, np.concatenate([weight.grad.ravel(), bias.grad]), rtol=1e-9)


def test_padding_rows_of_an_encoder_are_left_out() -> None:
    contract = NumpyEngine(batch_size=4, encoder=True).contract
    batch = make_batch([classified(1, [1, 2], 3, 0), classified(2, [3], 3, 2)], contract)
    head = Head(3, 6)
    head.values[:] = 1
    found = BatchLoss(batch, np.ones((8, 6), np.float32), head=head, copies=2).scores
    assert found.shape == (2, 2, 3)
    assert batch.attention_mask.sum(1).tolist() == [2, 1, 1, 1]


MIXED = [
    completion(1, [1, 2, 3], 1),
    choice(2, [3], [7, 8], 0),
    long_choice(3, [1], [[3], [4, 5, 6]], 1),
]


@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("folds", [1, 2])
def test_the_chain_rule_between_answers_and_losses(encoder: bool, folds: int) -> None:
    """By the answers, and along directions of them: both are slopes of the losses, by central differences."""
    random = np.random.default_rng(0)
    contract = NumpyEngine(batch_size=6, encoder=encoder).contract
    examples = [classified(row, [row], 3, row % 3) for row in (1, 2, 3)] if encoder else MIXED
    batch = make_batch(examples, contract)
    heads = [Head(3, 6) for _ in range(folds)]
    for each in heads:
        each.values[:] = random.normal(size=each.size)
    head = (CrossFittedHeads(heads) if folds > 1 else heads[0]) if encoder else None
    answers = random.normal(size=(6, 6 if encoder else 4))
    along = random.normal(size=(5, *answers.shape))
    loss = BatchLoss(batch, answers, head=head)
    length = 1e-5
    above, below = (
        [replace(loss, answers=answers + scale * way).losses[0] for way in along]
        for scale in (length, -length)
    )
    expected = (np.stack(above) - np.stack(below)) / (2 * length)
    np.testing.assert_allclose(loss.along(along), expected, atol=1e-8)
    np.testing.assert_allclose((loss.by_answer * along).sum((1, 2)), expected.sum(1), atol=1e-8)
    assert not loss.by_answer[batch.owner < 0].any()


def test_the_largest_tangent_is_one_that_was_asked_for() -> None:
    batch = make_batch([completion(1, [1, 2, 3], 1)], NumpyEngine(batch_size=2).contract)
    tangents = np.full((2, 2, 4), 9.0)
    tangents[:, 0, :2] = [[1, -3], [2, 0]]
    loss = BatchLoss(batch, np.zeros((2, 4)))
    assert loss.largest(tangents) == 3
    tangents[1, 0, 1] = np.nan
    assert np.isnan(loss.largest(tangents))
    batch = make_batch([classified(1, [1], 3, 0)], NumpyEngine(batch_size=2, encoder=True).contract)
    loss = BatchLoss(batch, np.zeros((2, 6)), head=Head(3, 6))
    assert loss.largest(np.array([[[1, -2], [5, 5]]])) == 2


PAGE = Path(__file__).resolve().parents[3] / "docs/extending.md"


def margin() -> Any:
    """The loss of docs/extending.md."""
    code = PAGE.read_text(encoding="utf-8").split("class Margin:")[1].split("\n\n\n")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    page: dict[str, Any] = {"np": np, "labels_of": labels_of}
    exec(f"class Margin:{code}", page)
    return page["Margin"]()


@pytest.mark.parametrize("name", ["differences", "tangents", "exact"])
def test_a_loss_of_ones_own_trains_by_every_estimator(name: str) -> None:
    rows = [choice(row, [row % 7, row % 5], [1, 3, 8], row % 3) for row in range(1, 25)]
    model = NumpyEngine(copies=8, batch_size=6)
    engines: dict[str, tuple[Any, Estimator]] = {
        "differences": (model, Differences(Antithetic(8, 1e-3))),
        "tangents": (model.tangent(8), Tangents()),
        "exact": (model.exact(), Exact()),
    }
    engine, estimator = engines[name]
    adapter, scoring = Adapter.zeros(model.contract.modules), model.with_copies(1)
    sampler, objective = Sampler(rows, engine.contract, 1), margin()

    def loss() -> float:
        return score(scoring, adapter, rows, objective=objective).loss

    before = loss()
    for number in range(60):
        step = Step(adapter, sampler.batches(number), 1, number, objective=objective)
        learnt = estimator.measure(engine, step).learnt
        adapter.values -= 0.1 * estimator.gradient(learnt, 1, number, adapter.modules)
    assert loss() < 0.6 * before
