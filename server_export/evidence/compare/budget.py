"""How many steps a budget of rows, seconds or steps is for a method, and after which it is evaluated."""

from __future__ import annotations

import math

from server_export.evidence.compare.settings import BudgetKind


def steps_within(
    kind: BudgetKind, value: float, rows_of_a_step: int, seconds_of_a_step: float | None = None
) -> int:
    """Whole steps that fit a budget, at least one.

    Args:
        kind: what the budget is of.
        value: how much there is.
        rows_of_a_step: rows that one step computes, a backward counted as two forwards.
        seconds_of_a_step: measured; needed for a budget of seconds.
    """
    cost = {"steps": 1.0, "rows": rows_of_a_step, "seconds": seconds_of_a_step}[kind]
    assert cost
    # A quotient such as 0.3 / 0.1 is just below the whole number that it stands for.
    return max(1, int(value / cost * (1 + 1e-12)))


def growing(steps: int, rows_of_a_step: int, first: float, growth: float) -> tuple[int, ...]:
    """Steps to evaluate after: the start, the last, and the first to reach each of a series of rows.

    The series is `first`, `first` x growth, `first` x growth^2 and so on: the same rows for every method,
    whatever its step costs, and as dense early as late when seen on a logarithmic axis.

    Args:
        steps: of the run.
        rows_of_a_step: rows that one step computes.
        first: rows of the first evaluation after the start.
        growth: between neighbours, above 1.
    """
    steps_to_evaluate = {0, steps}
    rows = first
    while rows < steps * rows_of_a_step:
        steps_to_evaluate.add(math.ceil(rows / rows_of_a_step))
        rows *= growth
    return tuple(sorted(steps_to_evaluate))
