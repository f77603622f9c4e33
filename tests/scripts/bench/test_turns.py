"""Measurements in turns and their summary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reports import measure_in_turns, median, parse_shape
from step import summarize_rounds


def test_measurements_alternate_and_every_second_round_runs_backwards() -> None:
    order: list[str] = []

    def step(name: str) -> Any:
        return lambda: order.append(name) or len(order)

    rounds = measure_in_turns({"a": step("a"), "b": step("b")}, 2)
    assert "".join(order) == "ab" + "ba" + "ab"
    assert rounds == [{"b": 3, "a": 4}, {"a": 5, "b": 6}]


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 8.0, "b": 2.0}, {"a": 9.0, "b": 3.0}]
    assert (median(rounds, "a"), median(rounds, "a", over="b")) == (8.0, 3.0)


def test_shapes_are_rows_and_tokens() -> None:
    assert parse_shape("2x64") == (2, 64)


def test_a_step_is_compared_with_its_limit() -> None:
    def step(seconds: float, inside: float, projected_gradient: float) -> Any:
        return seconds, SimpleNamespace(
            engine_seconds=inside, projected_gradients=np.array([projected_gradient])
        )

    figures_by_name = {
        "forward": step(2.5, 2.0, 1.0),
        "sequential": step(5.0, 4.0, 1.5),
        "inner": step(4.0, 3.0, 1.0),
        "outer": step(2.5, 2.0, 1.0),
        "jvp": step(2.0, 1.5, 9.0),
        "forward_limit": 1.0,
        "jvp_limit": 0.5,
    }
    figures = summarize_rounds([figures_by_name] * 3)
    assert (figures["forward_over_limit"], figures["jvp_over_limit"]) == (2.0, 3.0)
    assert (figures["parallel_speedup"], figures["largest_scalar_difference"]) == (2.0, 0.5)
    assert (figures["inner_speedup"], figures["outer_speedup"]) == (1.25, 2.0)
    assert (figures["host_share"], figures["repeats"]) == (pytest.approx(0.2), 3)
