"""Derivatives in the engine's operators are those of autograd, also for large values."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from server_export.ir.operators import row_of
from server_export.ir.writer import Eager

aten = torch.ops.aten

# Between 0 and the constant that keeps quotients finite, derivatives lie between those of both sides.
NUMBERS = st.lists(
    (st.floats(-8, 8, width=32) | st.floats(-(2.0**100), 2.0**100, width=32)).filter(
        lambda number: number == 0 or abs(number) > 1e-12
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("target", [aten.sigmoid.default, aten.relu.default, aten.gelu.default])
@given(NUMBERS)
@settings(derandomize=True)
def test_a_derivative_is_that_of_autograd(target: Any, numbers: list[float]) -> None:
    operator = row_of(target)
    assert operator is not None and operator.derivative is not None
    x = torch.tensor(numbers, requires_grad=True)
    y = target(x)
    (expected,) = torch.autograd.grad(y.sum(), x)
    with torch.no_grad():
        torch.testing.assert_close(operator.derivative(Eager(), x, y), expected, atol=1e-5, rtol=1e-5)
