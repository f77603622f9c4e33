"""Routing of tokens to experts equals a dense sum over all experts, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

from prge.engine import FloatArray
from prge.numerics.expert_routing import Routing

TOKENS, INPUTS, OUTPUTS, REST, PER_TOKEN, COUNT, QUERIES = 7, 5, 4, 3, 2, 6, 3
ROUTING = Routing(INPUTS + 2 * PER_TOKEN + REST, OUTPUTS + REST, INPUTS + 1, OUTPUTS, COUNT)


def random(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


MATRICES = random(COUNT, INPUTS, OUTPUTS)
INDEX = np.array([np.random.default_rng(token).permutation(COUNT)[:PER_TOKEN] for token in range(TOKENS)])


def states() -> FloatArray:
    result = random(TOKENS, ROUTING.entering, seed=1)
    result[:, INPUTS + PER_TOKEN : INPUTS + 2 * PER_TOKEN] = INDEX
    return result


def dense(state: FloatArray) -> FloatArray:
    """Return the hidden states after the experts, token by token, [tokens, leaving], in double precision."""
    state = state.astype(np.float64)
    result = np.zeros((TOKENS, ROUTING.leaving))
    result[:, OUTPUTS:] = state[:, -REST:]
    for token, row in enumerate(state):
        for choice, expert in enumerate(INDEX[token]):
            result[token, :OUTPUTS] += row[INPUTS + choice] * (row[:INPUTS] @ MATRICES[expert])
    return result


def forward(expert: int, expert_inputs: FloatArray, *tangents: FloatArray) -> list[FloatArray]:
    inputs, weight = expert_inputs[:, :-1], expert_inputs[:, -1:]
    output = inputs @ MATRICES[expert]
    moved = [each[..., :-1] @ MATRICES[expert] * weight + output * each[..., -1:] for each in tangents]
    return [output * weight, *moved]


def backward(expert: int, expert_inputs: FloatArray, grad_output: FloatArray) -> list[FloatArray]:
    inputs, weight = expert_inputs[:, :-1], expert_inputs[:, -1:]
    grad_weight = ((inputs @ MATRICES[expert]) * grad_output).sum(-1, keepdims=True)
    return [np.concatenate([weight * grad_output @ MATRICES[expert].T, grad_weight], -1)]


def test_hidden_states_after_experts_are_the_weighted_sum_of_the_chosen_ones() -> None:
    assert ROUTING.is_consistent and (ROUTING.experts_per_token, ROUTING.passed_through) == (PER_TOKEN, REST)
    (outputs,) = ROUTING.forward(states(), forward)
    np.testing.assert_allclose(outputs, dense(states()), atol=1e-5)


def test_tangents_and_gradients_are_derivatives() -> None:
    moves = random(QUERIES, TOKENS, ROUTING.entering, seed=2)
    # The expert indices have no derivative.
    moves[..., INPUTS + PER_TOKEN : INPUTS + 2 * PER_TOKEN] = 0
    state, tangents = ROUTING.forward(states(), forward, moves)
    np.testing.assert_allclose(state, dense(states()), atol=1e-5)
    step = 1e-3
    for move, tangent in zip(moves, tangents, strict=True):
        expected = (dense(states() + step * move) - dense(states() - step * move)) / (2 * step)
        np.testing.assert_allclose(tangent, expected, atol=2e-3)
    grad_output = random(TOKENS, ROUTING.leaving, seed=3)
    gradient = ROUTING.backward(states(), grad_output, backward)
    np.testing.assert_allclose(
        (gradient * moves).sum((1, 2)), (grad_output * tangents).sum((1, 2)), rtol=1e-4
    )
    # The backward pass doesn't read the values that pass through.
    partial = ROUTING.backward(states()[:, : ROUTING.read_width], grad_output, backward)
    assert partial.tobytes() == gradient.tobytes()


def test_only_chosen_experts_run_each_on_its_own_tokens() -> None:
    requested: list[tuple[int, int]] = []

    def run(expert: int, expert_inputs: FloatArray) -> list[FloatArray]:
        requested.append((expert, len(expert_inputs)))
        return forward(expert, expert_inputs)

    ROUTING.forward(states()[:2], run)
    assert requested == [(int(e), int((INDEX[:2] == e).sum())) for e in np.unique(INDEX[:2])]


@pytest.mark.parametrize("expert", [COUNT, -1, 0.5, np.nan])
def test_an_expert_that_does_not_exist_is_an_error(expert: float) -> None:
    invalid = states()
    invalid[2, INPUTS + PER_TOKEN] = expert
    with pytest.raises(RuntimeError, match=str(COUNT)):
        ROUTING.forward(invalid, forward)
