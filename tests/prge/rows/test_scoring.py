"""What an evaluation says: the loss, the task's metric, and whether its rows were whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prge.adapter import Adapter
from prge.rows.scoring import evaluate
from tests.numpy_engine import NumpyEngine
from tests.rows import bigram_completions


def test_texts_are_scored_by_their_perplexity_and_less_is_better() -> None:
    engine = NumpyEngine(copies=2)
    record, scores = evaluate(
        engine, Adapter.zeros(engine.contract.modules), bigram_completions(6), task=None
    )
    expected = np.exp((scores.losses * scores.tokens).sum() / scores.tokens.sum())
    assert record["perplexity"] == pytest.approx(expected)
    assert record["value"] == -record["perplexity"] and record["examples"] == 6


def test_scores_of_cut_rows_say_so() -> None:
    engine = NumpyEngine(copies=2)
    adapter = Adapter.zeros(engine.contract.modules)
    whole = bigram_completions(6)
    assert "cut_examples" not in evaluate(engine, adapter, whole, task=None)[0]
    some = [replace(example, cut=index < 2) for index, example in enumerate(whole)]
    assert evaluate(engine, adapter, some, task=None)[0]["cut_examples"] == 2
