"""Convert a budget of rows, seconds or steps into steps, and choose the steps that are evaluated."""

from __future__ import annotations

import math

from server_export.evidence.compare.settings import BudgetUnit


def steps_within(
    unit: BudgetUnit, value: float, rows_of_a_step: int, seconds_of_a_step: float | None = None
) -> int:
    """Return the number of whole steps within a budget, at least one.

    Args:
        unit: unit of the budget.
        value: size of the budget.
        rows_of_a_step: rows that one step computes; a backward pass counts as two forward passes.
        seconds_of_a_step: measured; needed for a budget of seconds.
    """
    cost = {"steps": 1.0, "rows": rows_of_a_step, "seconds": seconds_of_a_step}[unit]
    assert cost
    # A quotient such as 0.3 / 0.1 is just below the exact integer.
    return max(1, int(value / cost * (1 + 1e-12)))


def evaluation_steps(steps: int, rows_of_a_step: int, first: float, growth: float) -> tuple[int, ...]:
    """Return the steps to evaluate after: 0, the last, and the first to reach each value of a series of rows.

    The series is `first`, `first` x growth, `first` x growth^2 and so on. It is the same for every method,
    whatever a step costs, and evenly spaced on a logarithmic axis.

    Args:
        steps: number of steps of the run.
        rows_of_a_step: rows that one step computes.
        first: rows at the first evaluation after the start.
        growth: factor between neighbours, above 1.
    """
    steps_to_evaluate = {0, steps}
    rows = first
    while rows < steps * rows_of_a_step:
        steps_to_evaluate.add(math.ceil(rows / rows_of_a_step))
        rows *= growth
    return tuple(sorted(steps_to_evaluate))
