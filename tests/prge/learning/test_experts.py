"""Tokens go to the experts that a router chose, and back, as a sum over all experts says."""

from __future__ import annotations

import numpy as np
import pytest

from prge.engine import FloatArray
from prge.learning.experts import Routing

TOKENS, SEEN, SAID, REST, CHOSEN, COUNT, QUERIES = 7, 5, 4, 3, 2, 6, 3
ROUTING = Routing(SEEN + 2 * CHOSEN + REST, SAID + REST, SEEN + 1, SAID, COUNT)


def random(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


MATRICES = random(COUNT, SEEN, SAID)
INDEX = np.array([np.random.default_rng(token).permutation(COUNT)[:CHOSEN] for token in range(TOKENS)])


def states() -> FloatArray:
    found = random(TOKENS, ROUTING.entering, seed=1)
    found[:, SEEN + CHOSEN : SEEN + 2 * CHOSEN] = INDEX
    return found


def dense(state: FloatArray) -> FloatArray:
    """What is behind the experts, token by token, [tokens, leaving], in double precision."""
    state = state.astype(np.float64)
    found = np.zeros((TOKENS, ROUTING.leaving))
    found[:, SAID:] = state[:, -REST:]
    for token, row in enumerate(state):
        for place, expert in enumerate(INDEX[token]):
            found[token, :SAID] += row[SEEN + place] * (row[:SEEN] @ MATRICES[expert])
    return found


def forward(expert: int, given: FloatArray, *tangents: FloatArray) -> list[FloatArray]:
    seen, share = given[:, :-1], given[:, -1:]
    said = seen @ MATRICES[expert]
    moved = [each[..., :-1] @ MATRICES[expert] * share + said * each[..., -1:] for each in tangents]
    return [said * share, *moved]


def back(expert: int, given: FloatArray, slope: FloatArray) -> list[FloatArray]:
    seen, share = given[:, :-1], given[:, -1:]
    by_share = ((seen @ MATRICES[expert]) * slope).sum(-1, keepdims=True)
    return [np.concatenate([share * slope @ MATRICES[expert].T, by_share], -1)]


def test_states_behind_experts_are_the_sum_of_what_was_chosen() -> None:
    assert ROUTING.fits and (ROUTING.chosen, ROUTING.rest) == (CHOSEN, REST)
    (found,) = ROUTING.forward(states(), forward)
    np.testing.assert_allclose(found, dense(states()), atol=1e-5)


def test_tangents_and_slopes_are_its_derivatives() -> None:
    moves = random(QUERIES, TOKENS, ROUTING.entering, seed=2)
    # A choice has no derivative.
    moves[..., SEEN + CHOSEN : SEEN + 2 * CHOSEN] = 0
    state, tangents = ROUTING.forward(states(), forward, moves)
    np.testing.assert_allclose(state, dense(states()), atol=1e-5)
    step = 1e-3
    for move, tangent in zip(moves, tangents, strict=True):
        expected = (dense(states() + step * move) - dense(states() - step * move)) / (2 * step)
        np.testing.assert_allclose(tangent, expected, atol=2e-3)
    slope = random(TOKENS, ROUTING.leaving, seed=3)
    found = ROUTING.back(states(), slope, back)
    np.testing.assert_allclose((found * moves).sum((1, 2)), (slope * tangents).sum((1, 2)), rtol=1e-4)
    # What passes by isn't read on the way back.
    assert ROUTING.back(states()[:, : ROUTING.read], slope, back).tobytes() == found.tobytes()


def test_only_experts_that_are_asked_for_run_each_on_its_own_tokens() -> None:
    asked: list[tuple[int, int]] = []

    def run(expert: int, given: FloatArray) -> list[FloatArray]:
        asked.append((expert, len(given)))
        return forward(expert, given)

    ROUTING.forward(states()[:2], run)
    assert asked == [(int(e), int((INDEX[:2] == e).sum())) for e in np.unique(INDEX[:2])]


@pytest.mark.parametrize("expert", [COUNT, -1, 0.5, np.nan])
def test_an_expert_that_is_not_there_is_an_error(expert: float) -> None:
    given = states()
    given[2, SEEN + CHOSEN] = expert
    with pytest.raises(RuntimeError, match=str(COUNT)):
        ROUTING.forward(given, forward)
