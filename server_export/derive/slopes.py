"""Slopes of elementwise functions, in operators that XNNPACK takes: for tangents and the backward pass alike.

Each takes `call`, which writes one operator, and the nodes of the function's argument and result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

aten = torch.ops.aten

# Keeps a quotient with a removable singularity at 0 finite there, and changes no other float32.
_TINY = 1e-20

Call = Callable[..., Node]


def sigmoid_slope(call: Call, result: Node) -> Node:
    """y (1 - y)."""
    return call(aten.sub.Tensor, result, call(aten.mul.Tensor, result, result))


def relu_slope(call: Call, argument: Node) -> Node:
    """1 above 0, else 0, without a comparison, which would leave the delegate."""
    return call(aten.clamp.default, call(aten.mul.Tensor, argument, 1 / _TINY), 0.0, 1.0)


def sign(call: Call, argument: Node) -> Node:
    """-1 below 0, 1 above, 0 between, without a comparison."""
    return call(aten.clamp.default, call(aten.mul.Tensor, argument, 1 / _TINY), -1.0, 1.0)


def gelu_slope(call: Call, argument: Node, result: Node) -> Node:
    """F(x) + x f(x) with the normal distribution F = y / x, which is 1/2 at 0, and its density f."""
    above = call(aten.add.Tensor, result, _TINY / 2)
    below = call(aten.add.Tensor, argument, _TINY)
    distribution = call(aten.div.Tensor, above, below)
    square = call(aten.mul.Tensor, call(aten.mul.Tensor, argument, argument), -0.5)
    density = call(aten.mul.Tensor, call(aten.exp.default, square), 1 / math.sqrt(2 * math.pi))
    return call(aten.add.Tensor, distribution, call(aten.mul.Tensor, argument, density))
