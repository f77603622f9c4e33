"""Slopes in the engine's operators are those of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from server_export.derive.slopes import gelu_slope, relu_slope, sigmoid_slope

# Between 0 and what a quotient is kept finite with, slopes are between those of both sides.
NUMBERS = st.lists(
    (st.floats(-8, 8, width=32) | st.floats(-(2.0**100), 2.0**100, width=32)).filter(
        lambda number: number == 0 or abs(number) > 1e-12
    ),
    min_size=1,
    max_size=8,
)


def call(target: Any, *arguments: Any) -> Any:
    """Computes what would be written into a graph."""
    return target(*arguments)


@pytest.mark.parametrize(
    ("function", "slope"),
    [
        (torch.sigmoid, lambda x, y: sigmoid_slope(call, y)),
        (torch.relu, lambda x, y: relu_slope(call, x)),
        (F.gelu, lambda x, y: gelu_slope(call, x, y)),
    ],
    ids=["sigmoid", "relu", "gelu"],
)
@given(NUMBERS)
@settings(derandomize=True)
def test_a_slope_is_that_of_autograd(
    function: Callable[[torch.Tensor], torch.Tensor],
    slope: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    numbers: list[float],
) -> None:
    x = torch.tensor(numbers, requires_grad=True)
    y = function(x)
    (expected,) = torch.autograd.grad(y.sum(), x)
    with torch.no_grad():
        torch.testing.assert_close(slope(x, y), expected, atol=1e-5, rtol=1e-5)
