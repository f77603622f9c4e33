"""Scoring examples with one adapter."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from prge.engine import Array
from prge.learning.evaluation import pooled_states, score
from prge.learning.head import Head, fit_head
from tests.numpy_engine import NumpyEngine, adapter_of
from tests.rows import choice, classified, long_choice, random_completions


@pytest.mark.parametrize("copies", [1, 3, 8])
def test_copies_only_change_how_many_calls_it_takes(copies: int) -> None:
    examples = [
        *random_completions(5),
        choice(6, [1, 2], [3, 4], 1),
        long_choice(7, [1], [[2, 3], [4, 5, 6]], 0),
    ]
    reference = score(NumpyEngine(), adapter_of(NumpyEngine()), examples)
    engine = NumpyEngine().with_copies(copies)
    found = score(engine, adapter_of(engine), examples)
    np.testing.assert_allclose(found.losses, reference.losses, rtol=1e-9)
    assert found.predictions.tolist() == reference.predictions.tolist()
    assert engine.calls == -(-8 // engine.contract.rows)


def test_an_example_may_have_more_candidates_than_a_call_has_rows() -> None:
    example = long_choice(1, [1], [[2, c] for c in range(9)], 4)
    found = score(NumpyEngine(batch_size=2), adapter_of(NumpyEngine()), [example])
    alone = score(NumpyEngine(batch_size=16), adapter_of(NumpyEngine()), [example])
    np.testing.assert_allclose(found.scores[0], alone.scores[0], rtol=1e-9)
    assert found.scores[0].shape == (9,)


def test_encoder_with_a_fitted_head() -> None:
    engine = NumpyEngine(copies=2, encoder=True)
    examples = [classified(row, [row % 3, row % 3, row % 5], 3, row % 3) for row in range(1, 31)]
    states = pooled_states(engine, adapter_of(engine), examples)
    head = fit_head(states, np.array([e.label for e in examples]), 3)
    found = score(engine, adapter_of(engine), examples, head)
    assert (found.predictions == [e.label for e in examples]).mean() > 0.9
    assert score(engine, adapter_of(engine), examples, Head(3, 6)).loss == pytest.approx(np.log(3))


def test_rows_of_about_one_length_go_together_and_answers_come_in_order() -> None:
    lengths: list[list[int]] = []

    class Noting(NumpyEngine):
        def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
            lengths.append((inputs["tokens"] != 0).sum(1).tolist())
            return super().forward(inputs)

    engine = Noting(copies=2, batch_size=1, encoder=True)
    examples = [classified(row, [1] * length, 2, row % 2) for row, length in enumerate((2, 7, 3, 1, 6), 1)]
    adapter = adapter_of(engine)
    states = pooled_states(engine, adapter, examples)
    score(engine, adapter, examples, Head(2, 6))
    assert lengths == [[7, 6], [3, 2], [1, 0]] * 2
    alone = [pooled_states(NumpyEngine(encoder=True), adapter, [example])[0] for example in examples]
    np.testing.assert_allclose(states, alone, rtol=1e-9)
