"""Heads of an encoder's examples."""

from __future__ import annotations

import numpy as np

from prge.engine import TokenSequence
from prge.files.adapter import Adapter
from prge.learning.encoder_heads import digest_of, fit_heads
from prge.learning.examples import Example
from tests.numpy_engine import NumpyEngine


def example(row: int, tokens: tuple[int, ...], label: int) -> Example:
    return Example(row, (TokenSequence(tokens),), 2, label)


def test_of_equal_rows_one_is_fitted() -> None:
    """Rows that are left out to measure a head's confidence must be new to it."""
    engine = NumpyEngine(encoder=True)
    adapter = Adapter.zeros(engine.model.modules)
    chance = np.random.default_rng(0)
    rows = [example(n + 1, tuple(chance.integers(1, 11, 3).tolist()), n % 2) for n in range(20)]
    copies = [example(n + 21, row.sequences[0].tokens, row.label or 0) for n, row in enumerate(rows[:15])]
    alone, both = (fit_heads(engine, adapter, each).head for each in (rows, rows + copies))
    assert alone is not None and both is not None
    np.testing.assert_array_equal(alone.values, both.values)


def test_heads_are_known_by_all_that_they_depend_on() -> None:
    adapter = Adapter.zeros(NumpyEngine(encoder=True).model.modules)
    other = adapter.copy()
    other.values[0] = 1
    rows = [example(1, (3, 4), 0), example(2, (5,), 1)]
    cases = [
        ("bundle", adapter, rows, 10),
        ("another", adapter, rows, 10),
        ("bundle", other, rows, 10),
        ("bundle", adapter, rows[:1], 10),
        ("bundle", adapter, [rows[0], example(2, (5,), 0)], 10),
        ("bundle", adapter, [rows[0], example(2, (6,), 1)], 10),
        ("bundle", adapter, [rows[0], example(3, (5,), 1)], 10),
        ("bundle", adapter, rows, 0),
    ]
    assert len({digest_of(*case) for case in cases}) == len(cases)
    again = [example(1, (3, 4), 0), example(2, (5,), 1)]
    assert digest_of("bundle", adapter.copy(), again, 10) == digest_of(*cases[0])
