"""Measurements in turns, and what they come to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chain import compared, shape_of
from loops import copies_of
from step import figures_of, taken


def test_a_chain_is_compared_in_pairs_after_a_first_call() -> None:
    order: list[str] = []

    def timed(name: str, seconds: float) -> Any:
        def step() -> tuple[float, float]:
            order.append(name)
            return seconds, seconds / 10

        return step

    figures = compared(timed("chain", 3.0), timed("one", 2.0), 2)
    assert "".join(name[0] for name in order) == "co" + "oc" + "co"
    assert figures["chain_over_monolith"] == 1.5
    assert figures["loss_difference"] == pytest.approx(0.1)
    assert compared(timed("chain", 3.0), None, 2) == {"chain_seconds": 3.0}


def test_shapes_are_rows_and_tokens() -> None:
    assert shape_of("2x64") == (2, 64)


def test_loops_of_one_query_and_of_more() -> None:
    assert copies_of(4) == {"both": 8, "outer": 4, "inner": 2, "mezo": 1}
    assert set(copies_of(1).values()) == {2, 1}


def test_a_step_is_held_against_its_limit() -> None:
    def step(seconds: float, inside: float, scalar: float) -> Any:
        return lambda: (seconds, SimpleNamespace(engine_seconds=inside, scalars=np.array([scalar])))

    steps = {
        "stack": step(2.5, 2.0, 1.0),
        "sequential": step(5.0, 4.0, 1.5),
        "tangent": step(2.0, 1.5, 9.0),
    }
    rounds, difference = taken(steps, {"stack": lambda: 1.0, "tangent": lambda: 0.5}, 3)
    figures = figures_of(rounds, difference)
    assert (figures["stack_over_limit"], figures["tangent_over_limit"]) == (2.0, 3.0)
    assert (figures["parallel_speedup"], figures["largest_scalar_difference"]) == (2.0, 0.5)
    assert figures["repeats"] == 3
