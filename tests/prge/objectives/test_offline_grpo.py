"""Policy gradients of rated answers: the clipped loss, its gradient, and what it learns from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prge.objectives.examples import Example
from prge.objectives.preferences import (
    ObjectiveFlags,
    OfflineGRPO,
    describe_objective,
    make_objective,
    resolve_objective,
)
from tests.rows import completion


def rated(*liked: bool) -> list[Example]:
    """Return answers with reference scores of -1."""
    examples = [completion(row, [1, 2, 3], 1) for row in range(1, len(liked) + 1)]
    return [
        replace(example, liked=each, reference=(-1.0,)) for example, each in zip(examples, liked, strict=True)
    ]


def scores(*changes: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return -1 + np.array(changes)[None, :, None]


def test_liked_answers_become_likelier_and_disliked_ones_less_likely() -> None:
    """Advantages are rewards of 1 and -1 without their mean, here 0.5."""
    gradients = OfflineGRPO(0.0).gradients(scores(0, 0, 0, 0), rated(True, True, True, False))
    assert gradients[0, :, 0].tolist() == [-0.5, -0.5, -0.5, 1.5]


def test_equal_ratings_teach_nothing() -> None:
    for liked in (True, False):
        assert not OfflineGRPO(0.0).gradients(scores(0, 0.1), rated(liked, liked)).any()


def test_an_answer_beyond_the_clip_range_has_no_gradient_only_in_the_direction_of_its_rating() -> None:
    beyond = np.log(1.3), -np.log(1.3)
    for changes, zero in ((beyond, True), (beyond[::-1], False)):
        gradients = OfflineGRPO(0.0).gradients(scores(*changes), rated(True, False))
        assert not gradients.any() if zero else gradients.all()


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_gradients_are_derivatives_of_the_losses(beta: float) -> None:
    objective, examples = OfflineGRPO(beta), rated(True, False, False)
    table, step = scores(0.1, -0.05, 0.3), 1e-6
    gradients = objective.gradients(table, examples)
    for index in range(3):
        shift = np.zeros_like(table)
        shift[0, index, 0] = step
        ends = [objective.losses(table + sign * shift, examples)[0, index] for sign in (1, -1)]
        assert gradients[0, index, 0] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6)


def test_its_name_and_its_rows() -> None:
    assert make_objective("grpo", ObjectiveFlags()) == OfflineGRPO(0.0)
    assert make_objective("grpo", ObjectiveFlags(beta=0.2)) == OfflineGRPO(0.2)
    assert describe_objective(OfflineGRPO(0.2)) == {"name": "offlinegrpo", "beta": 0.2, "clip_range": 0.2}
    assert resolve_objective("grpo", "ratings") == "grpo"
    with pytest.raises(ValueError, match="ratings, or from a --reward"):
        resolve_objective("grpo", "")
