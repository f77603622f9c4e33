"""Curves of runs: points of their metrics, smoothing, and unique names of the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from prge.formats.curves import labels, series, smooth


def test_a_series_omits_values_that_are_not_finite() -> None:
    run = [{"event": "step", "step": n, "loss": loss} for n, loss in enumerate([1.0, None, 0.5])]
    assert series(run, "step", "step", ["loss"]) == ([0.0, 2.0], [1.0, 0.5])
    assert series(run, "evaluation", "step", ["loss"]) == ([], [])


def test_smoothing_keeps_a_constant_and_follows_a_change() -> None:
    assert smooth([2.0] * 5, 0.9) == pytest.approx([2.0] * 5)
    assert smooth([1.0, 3.0, 2.0], 0.0) == [1.0, 3.0, 2.0]
    # Weights of the past are normalized: the second value is (0.5 * 0 + 1 * 3) / 1.5.
    assert smooth([0.0, 3.0], 0.5) == pytest.approx([0.0, 2.0])
    assert smooth([], 0.9) == []


def test_labels_are_the_shortest_that_differ() -> None:
    assert labels([Path("/a/x"), Path("/b/y")]) == ["x", "y"]
    assert labels([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]
    assert labels([Path("/a/x"), Path("/a/x")]) == ["x", "x"]
