"""Scores of examples with one adapter."""

from __future__ import annotations

import numpy as np
import pytest

from prge.objectives import scoring as evaluation
from prge.objectives.classification_head import Head, fit_head
from prge.objectives.scoring import pooled_states, score, with_reference_scores
from tests.numpy_engine import NumpyEngine, make_nonzero_adapter
from tests.rows import choice, classification, long_choice, random_completions


@pytest.mark.parametrize(("tokens", "calls"), [(1, 8), (12, 4), (512, 1)])
def test_the_size_of_calls_does_not_change_scores(
    tokens: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [
        *random_completions(5),
        choice(6, [1, 2], [3, 4], 1),
        long_choice(7, [1], [[2, 3], [4, 5, 6]], 0),
    ]
    adapter = make_nonzero_adapter(NumpyEngine())
    reference = [score(NumpyEngine(), adapter, [example]) for example in examples]
    engine = NumpyEngine()
    monkeypatch.setattr(evaluation, "MAX_SCORING_TOKENS", tokens)
    result = score(engine, adapter, examples)
    np.testing.assert_allclose(result.losses, [each.losses[0] for each in reference], rtol=1e-9)
    assert result.predictions.tolist() == [each.predictions[0] for each in reference]
    assert engine.calls == calls


def test_an_example_may_have_more_candidates_than_are_scored_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    example = long_choice(1, [1], [[2, c] for c in range(9)], 4)
    adapter = make_nonzero_adapter(NumpyEngine())
    whole = score(NumpyEngine(), adapter, [example])
    engine = NumpyEngine()
    monkeypatch.setattr(evaluation, "MAX_SCORING_TOKENS", 7)
    result = score(engine, adapter, [example])
    assert [len(sequences) for sequences in engine.computed] == [2, 2, 2, 2, 1]
    np.testing.assert_allclose(result.scores[0], whole.scores[0], rtol=1e-9)
    assert result.scores[0].shape == (9,)


def test_encoder_with_a_fitted_head() -> None:
    engine = NumpyEngine(encoder=True)
    examples = [classification(row, [row % 3, row % 3, row % 5], 3, row % 3) for row in range(1, 31)]
    states = pooled_states(engine, make_nonzero_adapter(engine), examples)
    head = fit_head(states, np.array([e.label for e in examples]), 3)
    result = score(engine, make_nonzero_adapter(engine), examples, head)
    assert (result.predictions == [e.label for e in examples]).mean() > 0.9
    assert score(engine, make_nonzero_adapter(engine), examples, Head(3, 6)).loss == pytest.approx(np.log(3))


def test_rows_of_similar_length_are_computed_together_and_results_are_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "MAX_SCORING_TOKENS", 13)
    engine = NumpyEngine(encoder=True)
    examples = [
        classification(row, [1] * length, 2, row % 2) for row, length in enumerate((2, 7, 3, 1, 6), 1)
    ]
    adapter = make_nonzero_adapter(engine)
    states = pooled_states(engine, adapter, examples)
    score(engine, adapter, examples, Head(2, 6))
    lengths = [[len(sequence.tokens) for sequence in sequences] for sequences in engine.computed]
    assert lengths == [[7, 6], [3, 2, 1]] * 2
    alone = [pooled_states(NumpyEngine(encoder=True), adapter, [example])[0] for example in examples]
    np.testing.assert_allclose(states, alone, rtol=1e-9)


def test_long_sequences_with_a_common_prefix_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tokens in {"MAX_SCORING_TOKENS": 6, "LONG_TOKENS": 4, "MAX_LONG_TOKENS": 19}.items():
        monkeypatch.setattr(evaluation, name, tokens)
    texts = ([1, 1, 1, 1, 1, 2], [3] * 6, [1, 2], [1, 1, 1, 1, 1, 3, 1], [1, 1, 1, 1, 1, 4], [2, 4, 3])
    examples = [choice(row, text, [3, 4], 1) for row, text in enumerate(texts, 1)]
    engine = NumpyEngine()
    adapter = make_nonzero_adapter(engine)
    result = score(engine, adapter, examples)
    computed = [[list(each.tokens) for each in sequences] for sequences in engine.computed]
    assert computed == [[texts[0], texts[3], texts[4]], [texts[1]], [texts[5], texts[2]]]
    alone = [score(NumpyEngine(), adapter, [example]).losses[0] for example in examples]
    np.testing.assert_allclose(result.losses, alone, rtol=1e-9)


def test_progress_counts_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MAX_SCORING_TOKENS", 12)
    examples = [*random_completions(3), long_choice(4, [1], [[2, 3], [4, 5, 6]], 0)]
    for scored in (score, with_reference_scores):
        done: list[int] = []
        scored(NumpyEngine(), make_nonzero_adapter(NumpyEngine()), examples, on_progress=done.append)
        assert done == [2, 4, 5]


def test_reference_scores_are_those_of_the_adapter() -> None:
    examples = [long_choice(row, [row], [[2, 3], [4, 5, 6]], 0) for row in range(1, 4)]
    engine = NumpyEngine()
    result = with_reference_scores(engine, make_nonzero_adapter(engine), examples)
    scores = score(engine, make_nonzero_adapter(engine), examples).scores
    assert [each.reference for each in result] == [tuple(values.tolist()) for values in scores]
