"""Scores, losses and their derivative, against torch's autograd."""

from __future__ import annotations

import numpy as np
import torch

from prge.examples import make_batch
from prge.head import CrossFittedHeads, Head
from prge.objectives import largest_tangent, losses, score_gradient, score_slopes, scores
from tests.numpy_engine import NumpyEngine
from tests.rows import choice, classified, completion, long_choice


def test_completion_loss_is_the_mean_negative_log_likelihood() -> None:
    contract = NumpyEngine(batch_size=3).contract
    batch = make_batch([completion(1, [1, 2, 3, 4], 2), completion(2, [5, 6], 1)], contract)
    logprobs = -np.arange(2 * 3 * 4, dtype=np.float32).reshape(6, 4)
    found = losses(scores(batch, {"logprobs": logprobs}, 2), batch.labels)
    np.testing.assert_allclose(found, [[0.5, 4], [12.5, 16]])


def test_candidate_loss_is_cross_entropy_over_the_candidates_alone() -> None:
    contract = NumpyEngine(batch_size=2).contract
    batch = make_batch([choice(1, [1, 2], [7, 8, 9], 2), choice(2, [3], [7, 8], 0)], contract)
    logprobs = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32) - 5
    found = losses(scores(batch, {"logprobs": logprobs}, 2), batch.labels)
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
    first = losses(scores(batch, {"logprobs": logprobs}, 1), batch.labels)
    second = losses(scores(batch, {"logprobs": logprobs - 3}, 1), batch.labels)
    np.testing.assert_allclose(first, second, rtol=1e-12)


def test_longer_candidates_score_their_mean_token() -> None:
    contract = NumpyEngine(batch_size=4).contract
    batch = make_batch([long_choice(1, [1, 2], [[3], [4, 5, 6]], 1)], contract)
    logprobs = np.array([[-1, 0, 0, 0], [-2, -4, -6, 0], [9, 9, 9, 9], [9, 9, 9, 9]], np.float32)
    found = scores(batch, {"logprobs": logprobs}, 1)
    np.testing.assert_allclose(found, [[[-1, -4]]])


def test_derivative_by_scores_matches_autograd() -> None:
    table = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = np.array([0, 4, 2, -1])
    table.requires_grad_(True)
    chosen = torch.tensor([0, 4, 2])
    loss = (
        torch.nn.functional.cross_entropy(table[:, :3].reshape(-1, 5), chosen.repeat(3), reduction="sum")
        - table[:, 3, 0].sum()
    )
    loss.backward()
    found = losses(table.detach().numpy(), labels)
    np.testing.assert_allclose(found.sum(), loss.item(), rtol=1e-12)
    np.testing.assert_allclose(score_gradient(table.detach().numpy(), labels), table.grad, atol=1e-12)


def test_head_gradient_matches_autograd() -> None:
    random = np.random.default_rng(1)
    pooled = random.normal(size=(2, 5, 6)).astype(np.float32)
    labels = np.array([0, 2, 1, 1, 0])
    head = Head(3, 6)
    head.values[:] = random.normal(size=head.size)
    found = head.gradient(pooled, score_gradient(head.scores(pooled), labels))
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
    found = scores(batch, {"pooled": np.ones((8, 6), np.float32)}, 2, head)
    assert found.shape == (2, 2, 3)
    assert batch.attention_mask.sum(1).tolist() == [2, 1, 1, 1]


def test_scores_are_linear_so_their_slopes_are_differences_of_scores() -> None:
    contract = NumpyEngine(batch_size=6).contract
    batch = make_batch(
        [completion(1, [1, 2, 3], 1), choice(2, [3], [7, 8], 0), long_choice(3, [1], [[3], [4, 5, 6]], 1)],
        contract,
    )
    random = np.random.default_rng(0)
    at, along = random.normal(size=(6, 4)), random.normal(size=(5, 6, 4))
    found = score_slopes(batch, {"logprobs": at, "dlogprobs": along})
    there = batch.candidates[:, None] > np.arange(2)
    for query in range(5):
        before, after = (
            scores(batch, {"logprobs": logprobs}, 1)[0][there] for logprobs in (at, at + along[query])
        )
        np.testing.assert_allclose(found[query][there], after - before, atol=1e-12)
        assert not found[query][~there].any()


def test_slopes_of_an_encoder_leave_the_bias_out() -> None:
    batch = make_batch(
        [classified(row, [row], 3, 0) for row in (1, 2)], NumpyEngine(batch_size=4, encoder=True).contract
    )
    random = np.random.default_rng(0)
    heads = [Head(3, 6), Head(3, 6)]
    for head in heads:
        head.values[:] = random.normal(size=head.size)
    along = random.normal(size=(5, 4, 6))
    alone = score_slopes(batch, {"dpooled": along}, heads[0])
    np.testing.assert_allclose(alone, along[:, :2] @ heads[0].weight.T.astype(float), rtol=1e-12)
    folds = score_slopes(batch, {"dpooled": along}, CrossFittedHeads(heads))
    for example, fold in enumerate((1, 0)):
        np.testing.assert_allclose(
            folds[:, example], along[:, example] @ heads[fold].weight.T.astype(float), rtol=1e-12
        )


def test_the_largest_tangent_is_one_that_was_asked_for() -> None:
    batch = make_batch([completion(1, [1, 2, 3], 1)], NumpyEngine(batch_size=2).contract)
    tangents = np.full((2, 2, 4), 9.0)
    tangents[:, 0, :2] = [[1, -3], [2, 0]]
    assert largest_tangent(batch, {"dlogprobs": tangents}) == 3
    tangents[1, 0, 1] = np.nan
    assert np.isnan(largest_tangent(batch, {"dlogprobs": tangents}))
    batch = make_batch([classified(1, [1], 3, 0)], NumpyEngine(batch_size=2, encoder=True).contract)
    assert largest_tangent(batch, {"dpooled": np.array([[[1, -2], [5, 5]]])}) == 2
