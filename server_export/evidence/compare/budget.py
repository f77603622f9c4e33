"""Convert a budget of forward passes, seconds or steps into steps, and choose the evaluated steps."""

from __future__ import annotations

import math

from server_export.evidence.compare.settings import BudgetUnit


def steps_within(
    unit: BudgetUnit, value: float, step_passes: int, seconds_of_a_step: float | None = None
) -> int:
    """Return the number of whole steps within a budget, at least one.

    Args:
        unit: unit of the budget.
        value: size of the budget.
        step_passes: forward passes of one step; a backward pass counts as two forward passes.
        seconds_of_a_step: measured; needed for a budget of seconds.
    """
    cost = {"steps": 1.0, "forward_passes": step_passes, "seconds": seconds_of_a_step}[unit]
    assert cost
    # A quotient such as 0.3 / 0.1 is just below the exact integer.
    return max(1, int(value / cost * (1 + 1e-12)))


def evaluation_steps(steps: int, step_passes: int, first: float, growth: float) -> tuple[int, ...]:
    """Return the steps to evaluate after: 0, the last, and the first to reach each number of a series.

    The series consists of numbers of forward passes: `first`, `first` x growth, `first` x growth^2 and so on.
    It is the same for every method, whatever a step costs, and evenly spaced on a logarithmic axis.

    Args:
        steps: number of steps of the run.
        step_passes: forward passes of one step.
        first: forward passes at the first evaluation after the start.
        growth: factor between neighbours, above 1.
    """
    steps_to_evaluate = {0, steps}
    forward_passes = first
    while forward_passes < steps * step_passes:
        steps_to_evaluate.add(math.ceil(forward_passes / step_passes))
        forward_passes *= growth
    return tuple(sorted(steps_to_evaluate))
