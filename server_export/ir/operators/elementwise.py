"""Elementwise functions.

A derivative gets an object that writes or computes operators, the function's argument x, its result y, and
the function's other arguments. It uses operators that XNNPACK delegates.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from server_export.ir.operators.table import Category, gradient_of, row
from server_export.ir.writer import Calls, GraphWriter

aten = torch.ops.aten

# Keeps quotients with a removable singularity at 0 finite, and doesn't change any other float32 result.
_TINY = 1e-20


def step(w: Calls, x: Any) -> Any:
    """Return 1 for x > 0, else 0, without a comparison, which XNNPACK doesn't delegate."""
    return w.call(aten.clamp.default, w.times(x, 1 / _TINY), 0.0, 1.0)


def sign(w: Calls, x: Any) -> Any:
    """Return -1 for x < 0, 1 for x > 0, else 0, without a comparison."""
    return w.call(aten.clamp.default, w.times(x, 1 / _TINY), -1.0, 1.0)


def _gelu(w: Calls, x: Any, y: Any, **_: Any) -> Any:
    """Return F(x) + x f(x) with the normal distribution F = y / x, which is 1/2 at 0, and its density f."""
    distribution = w.call(aten.div.Tensor, w.plus(y, _TINY / 2), w.plus(x, _TINY))
    density = w.times(w.exp(w.times(w.times(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return w.plus(distribution, w.times(x, density))


def _erf(w: Calls, x: Any, y: Any) -> Any:
    return w.times(w.exp(w.times(w.times(x, x), -1.0)), 2 / math.sqrt(math.pi))


def _silu(w: Calls, x: Any, y: Any) -> Any:
    """Return the derivative s + y (1 - s) = s (1 + x - y), since y = x s."""
    return w.times(w.sigmoid(x), w.plus(w.minus(x, y), 1.0))


def _clamp(w: Calls, x: Any, y: Any, least: float | None = None, most: float | None = None) -> Any:
    inside = [] if least is None else [step(w, w.minus(x, least))]
    if most is not None:
        inside.append(step(w, w.plus(w.times(x, -1.0), most)))
    return w.times(*inside) if len(inside) > 1 else inside[0]


def _elu(w: Calls, x: Any, y: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    """Return `scale` for x > 0, else `input_scale` (y + alpha scale)."""
    above = step(w, x)
    below = w.times(w.plus(w.times(above, -1.0), 1.0), w.plus(y, alpha * scale))
    return w.plus(w.times(above, scale), w.times(below, input_scale))


# Rewrite, core and backward rules


def _power(writer: GraphWriter, node: Any, x: Any, exponent: float) -> Any:
    if exponent not in (2, 3):
        return None
    square = writer.times(x, x)
    return square if exponent == 2 else writer.times(square, x)


def _tanh_gelu(writer: GraphWriter, node: Any, x: Any, *, approximate: str = "none") -> Any:
    """Write the tanh approximation: XNNPACK always computes the exact form, which differs by up to 5e-4."""
    if approximate != "tanh":
        return None
    # 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), where tanh(z) = 2 sigmoid(2 z) - 1
    cube = writer.times(writer.times(x, x), x)
    inner = writer.plus(x, writer.times(cube, 0.044715))
    return writer.times(x, writer.sigmoid(writer.times(inner, 2 * math.sqrt(2 / math.pi))))


def _hard_tanh(writer: GraphWriter, node: Any, x: Any, least: float = -1.0, most: float = 1.0) -> Any:
    return writer.call(aten.clamp.default, x, least, most)


def _clamp_min(writer: GraphWriter, node: Any, x: Any, bound: float) -> Any:
    return writer.call(aten.clamp.default, x, bound)


def _clamp_max(writer: GraphWriter, node: Any, x: Any, bound: float) -> Any:
    return writer.call(aten.clamp.default, x, None, bound)


def _softplus(writer: GraphWriter, node: Any, x: Any) -> Any:
    """Write log(1 + exp(x)) without overflow."""
    small = writer.exp(writer.times(writer.call(aten.abs.default, x), -1.0))
    rest = writer.call(aten.log.default, writer.plus(small, 1.0))
    return writer.plus(writer.call(aten.relu.default, x), rest)


def _tanh_backward(writer: GraphWriter, node: Any, grad_output: Any, y: Any) -> Any:
    """Write one operator fewer than the product of grad_output and the derivative has."""
    return writer.minus(grad_output, writer.times(grad_output, writer.times(y, y)))


def _silu_backward(writer: GraphWriter, node: Any, grad_output: Any, x: Any) -> Any:
    """Write the derivative as s + y - y s, in terms that the forward pass computes too."""
    gate = writer.sigmoid(x)
    y = writer.times(x, gate)
    return writer.times(grad_output, writer.plus(gate, writer.minus(y, writer.times(y, gate))))


function = partial(row, category=Category.ELEMENTWISE)
gradient = partial(row, category=Category.GRADIENT)

function(aten.exp.default, derivative=lambda w, x, y: y)
function(aten.log.default, derivative=lambda w, x, y: w.reciprocal(x))
function(aten.expm1.default, derivative=lambda w, x, y: w.plus(y, 1.0))
function(aten.log1p.default, derivative=lambda w, x, y: w.reciprocal(w.plus(x, 1.0)))
function(aten.sqrt.default, derivative=lambda w, x, y: w.times(w.reciprocal(y), 0.5))
function(aten.rsqrt.default, derivative=lambda w, x, y: w.times(w.times(w.times(y, y), y), -0.5))
function(aten.reciprocal.default, derivative=lambda w, x, y: w.times(w.negative(y), y))
function(
    aten.pow.Tensor_Scalar,
    derivative=lambda w, x, y, n: w.times(w.call(aten.pow.Tensor_Scalar, x, n - 1), n),
    rewrite=_power,
)
function(aten.sin.default, derivative=lambda w, x, y: w.call(aten.cos.default, x))
function(aten.cos.default, derivative=lambda w, x, y: w.times(w.call(aten.sin.default, x), -1.0))
function(aten.erf.default, derivative=_erf)
function(aten.abs.default, derivative=lambda w, x, y: sign(w, x))
function(aten.clamp.default, derivative=_clamp)
function(aten.clamp_min.default, rewrite=_clamp_min)
function(aten.clamp_max.default, rewrite=_clamp_max)
function(aten.hardtanh.default, rewrite=_hard_tanh)
function(
    aten.leaky_relu.default,
    derivative=lambda w, x, y, leak=0.01: w.plus(w.times(step(w, x), 1.0 - leak), leak),
)
function(aten.elu.default, derivative=_elu)

function(aten.tanh.default, derivative=lambda w, x, y: w.plus(w.times(w.times(y, y), -1.0), 1.0))
gradient(aten.tanh_backward.default, backward=_tanh_backward)
function(aten.sigmoid.default, derivative=lambda w, x, y: w.minus(y, w.times(y, y)))
gradient(aten.sigmoid_backward.default, backward=gradient_of(aten.sigmoid.default, "result"))
function(aten.relu.default, derivative=lambda w, x, y: step(w, x))
gradient(aten.threshold_backward.default, backward=gradient_of(aten.relu.default, "result", usual=(0,)))
function(aten.softplus.default, derivative=lambda w, x, y: w.sigmoid(x), core=_softplus)
gradient(
    aten.softplus_backward.default, backward=gradient_of(aten.softplus.default, "argument", usual=(1, 20))
)
function(aten.silu.default, derivative=_silu, core=lambda writer, node, x: writer.times(x, writer.sigmoid(x)))
gradient(aten.silu_backward.default, backward=_silu_backward)
function(aten.gelu.default, derivative=_gelu, rewrite=_tanh_gelu)
gradient(aten.gelu_backward.default, backward=gradient_of(aten.gelu.default, "argument", usual=("none",)))
