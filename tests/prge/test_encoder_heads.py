"""Heads of an encoder's examples."""

from __future__ import annotations

import numpy as np

from prge.adapter import Adapter
from prge.encoder_heads import fit_heads
from prge.examples import Example, TokenSequence
from tests.numpy_engine import NumpyEngine


def example(row: int, tokens: tuple[int, ...], label: int) -> Example:
    return Example(row, (TokenSequence(tokens),), 2, label)


def test_of_equal_rows_one_is_fitted() -> None:
    """Rows that are left out to measure a head's confidence must be new to it."""
    engine = NumpyEngine(encoder=True)
    adapter = Adapter.zeros(engine.contract.modules)
    chance = np.random.default_rng(0)
    rows = [example(n + 1, tuple(chance.integers(1, 11, 3).tolist()), n % 2) for n in range(20)]
    copies = [example(n + 21, row.sequences[0].tokens, row.label or 0) for n, row in enumerate(rows[:15])]
    alone, both = (fit_heads(engine, adapter, each, 0).head for each in (rows, rows + copies))
    assert alone is not None and both is not None
    np.testing.assert_array_equal(alone.values, both.values)
