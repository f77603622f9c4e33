"""Evaluations: the loss, the task's metric, and whether rows were truncated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prge.data.forms.task import parse_task
from prge.formats.adapter import Adapter
from prge.training.evaluation import evaluate, text_metrics
from tests.numpy_engine import NumpyEngine
from tests.rows import bigram_completions


def test_texts_are_scored_by_their_perplexity_and_less_is_better() -> None:
    engine = NumpyEngine()
    record, scores = evaluate(engine, Adapter.zeros(engine.model.modules), bigram_completions(6), task=None)
    expected = np.exp((scores.losses * scores.tokens).sum() / scores.tokens.sum())
    assert record["perplexity"] == pytest.approx(expected)
    assert record["value"] == -record["perplexity"] and record["examples"] == 6


def test_truncated_rows_are_counted() -> None:
    engine = NumpyEngine()
    adapter = Adapter.zeros(engine.model.modules)
    whole = bigram_completions(6)
    assert "cut_examples" not in evaluate(engine, adapter, whole, task=None)[0]
    some = [replace(example, cut=index < 2) for index, example in enumerate(whole)]
    assert evaluate(engine, adapter, some, task=None)[0]["cut_examples"] == 2


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("f1_answer", {"exact_match": 1 / 3, "f1": (1 + 2 / 3 + 0) / 3}),
        ("exact_match", {"exact_match": 1 / 3, "f1": (1 + 2 / 3 + 0) / 3}),
        ("rouge_l", {"rouge_l": (1 + 2 / 3 + 0) / 3}),
    ],
)
def test_texts_are_compared_with_the_best_of_their_answers(metric: str, expected: dict[str, float]) -> None:
    content = {"name": "q", "template": "{q}", "columns": {"answers": "a"}, "metric": metric}
    examples = [replace(each, answers=("Paris", "Rome")) for each in bigram_completions(3)]
    result = text_metrics(parse_task(content, "q"), ["Rome.", "in Paris", "Bonn"], examples)
    assert result == pytest.approx(expected)
