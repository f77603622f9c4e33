"""Every JVP rule is compared with PyTorch's forward mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.extra.numpy import BroadcastableShapes, array_shapes, mutually_broadcastable_shapes
from torch import nn
from torch.fx import GraphModule

from prge.formats.relations import relation
from server_export.derive.jvp import transform
from server_export.derive.jvp.transform import ONES, Dense, differentiate
from server_export.ir.mixed_parts import MIXED_PARTS
from server_export.ir.operators import Operator, differentiable, row_of
from server_export.ir.rewriting import rewritten_graph
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.ir.unit_inverse import UNIT_INVERSE
from tests.server_export.derive.jvp.graphs import (
    Function,
    Tensors,
    directions,
    inputs_of,
    jvp,
    random,
    relative_difference,
    with_tangents,
)

torch.set_num_threads(1)
aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """A module or function of `active` tensors, which have tangents, and of `passive` ones."""

    module: nn.Module
    active: Tensors
    passive: Tensors = ()


CASES: dict[str, Case] = {}


def case(
    name: str,
    module: nn.Module | Callable[..., torch.Tensor],
    *active: torch.Tensor,
    passive: Tensors = (),
) -> None:
    """Register a case."""
    assert name not in CASES
    module = module if isinstance(module, nn.Module) else Function(module)
    CASES[name] = Case(module.double().requires_grad_(False), active, passive)


def positive(*shape: int, seed: int = 0) -> torch.Tensor:
    return random(*shape, seed=seed).abs() + 0.5


def linear(width: int, out: int, bias: bool = True) -> nn.Linear:
    """Return a layer with large weights, so that no tangent is small by chance."""
    layer = nn.Linear(width, out, bias=bias)
    layer.weight.data = random(out, width, seed=1)
    if bias:
        layer.bias.data = random(out, seed=2)
    return layer


X, Y, ROW, COLUMN, FLAT = random(2, 3, 4), random(2, 3, 4, seed=1), random(1, 4), random(3, 1), random(4)
INDEX = torch.tensor([2, 0, 2, 1])
MASK = random(3, 4, seed=5) > 0

# Shapes
case("reshape", lambda x: x.reshape(6, 4), X)
case("reshape to one dimension", lambda x: x.reshape(-1), X)
case("view", lambda x: x.view(2, 12), X)
case("unsqueeze in front", lambda x: x.unsqueeze(0), X)
case("unsqueeze at the end", lambda x: x.unsqueeze(-1), X)
case("squeeze", lambda x: x.squeeze(0), ROW)
case("squeeze of what isn't 1", lambda x: x.squeeze(-1), ROW)
case("squeeze of several", lambda x: x.squeeze((0, 2)), random(1, 3, 1))
case("flatten", lambda x: aten.flatten.using_ints(x, 1, -1), X)
case("transpose", lambda x: x.transpose(0, 1), X)
case("transpose from the end", lambda x: x.transpose(0, -1), X)
case("matrix transpose", lambda x: x.t(), random(3, 4))
case("matrix transpose of a row", lambda x: x.t(), FLAT)
case("permute", lambda x: x.permute(2, 0, 1), X)
case("permute from the end", lambda x: x.permute(-1, 0, -2), X)
case("expand", lambda x: x.expand(2, -1, 4), random(1, 3, 1))
case("expand to more dimensions", lambda x: x.expand(2, 3, 4), ROW)
case("slice", lambda x: x[1:], X)
case("slice of the last dimension", lambda x: x[..., -3:-1], X)
case("slice with steps", lambda x: x[:, ::2], X)
case("index_select", lambda x, i: x.index_select(1, i), X, passive=(INDEX,))
case("index_select from the end", lambda x, i: x.index_select(-1, i), X, passive=(INDEX,))

GATHERED = torch.tensor([[[2, 0], [1, 1], [3, 0]]] * 2)
case("gather", lambda x, i: x.gather(-1, i), X, passive=(GATHERED,))
case("repeat", lambda x: x.repeat(2, 1, 1, 3), X)
case("flip", lambda x: x.flip(0, -1), X)
case("pad", lambda x: aten.constant_pad_nd.default(x, [1, 2, 0, 1], 3.0), X)
case("cumsum", lambda x: x.cumsum(1), X)
case("cumsum from the end", lambda x: x.cumsum(-1), X)
case("unbind", lambda x: x.unbind(1)[1], X)

# Sums
for name in ("sum", "mean"):
    for dims in ([0], [-1], [0, 2], [1, -1]):
        for keepdim in (False, True):
            case(
                f"{name} over {dims}{', kept' * keepdim}",
                lambda x, name=name, dims=dims, keepdim=keepdim: getattr(x, name)(dims, keepdim=keepdim),
                X,
            )
case("sum over everything", lambda x: aten.sum.dim_IntList(x, []), X)
case("mean over everything", lambda x: aten.mean.dim(x, None), X)
case("mean that is a product with ones", lambda x: x.mean(-1, keepdim=True) * x, X)

# Linear layers
case("linear", linear(4, 5, bias=False), X)
case("linear of one row", linear(4, 5, bias=False), FLAT)
case("linear with bias", linear(4, 5), X)
case("linear of one row with bias", linear(4, 5), FLAT)
case("linear with weight and bias from outside", F.linear, X, passive=(random(5, 4), random(5)))
case("linear with one output", linear(4, 1, bias=False), X)
case("linear with one output and bias", linear(4, 1), X)

# Sums, products and quotients
OPERATORS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
}
for sign, operate in OPERATORS.items():
    case(f"x {sign} y", operate, X, positive(2, 3, 4))
    case(f"x {sign} x", lambda x, operate=operate: operate(x, x), positive(2, 3))
    case(f"x {sign} number", lambda x, operate=operate: operate(x, 1.5), X)
    case(f"x {sign} constant", operate, X, passive=(positive(2, 3, 4),))
    case(f"constant {sign} x", lambda x, c, operate=operate: operate(c, x), positive(3, 4), passive=(X,))
    case(f"row {sign} column", operate, ROW, positive(3, 1))
    case(f"row {sign} constant column", operate, ROW, passive=(positive(3, 1),))
    case(
        f"constant row {sign} column",
        lambda x, c, operate=operate: operate(c, x),
        positive(3, 1),
        passive=(ROW,),
    )
    case(f"small {sign} large constant", operate, FLAT, passive=(positive(2, 3, 4),))
    case(f"large {sign} small", operate, X, positive(4))
    case(f"small {sign} large", operate, FLAT, positive(2, 3, 4))
case(
    "x with a factor times its layer",
    lambda x, w: F.linear(hidden := torch.exp(x), w) * hidden,
    X,
    passive=(random(4, 4),),
)
case("number * x", lambda x: 2 * x, X)
case("2 + x", lambda x: 2 + x, X)
case("number / x", lambda x: aten.mul.Tensor(aten.reciprocal.default(x), 3), positive(3, 4))
case("x + 3 y", lambda x, y: torch.add(x, y, alpha=3), X, Y)
case("x - 3 y", lambda x, y: torch.sub(x, y, alpha=3), X, Y)
case("x - 3 constant", lambda x, c: torch.sub(x, c, alpha=3), X, passive=(Y,))
case("constant - 3 x", lambda x, c: torch.sub(c, x, alpha=3), X, passive=(Y,))
case("-x", lambda x: -x, X)

# Products of matrices
case("bmm of two", torch.bmm, X, random(2, 4, 5))
case("bmm with a constant right", torch.bmm, X, passive=(random(2, 4, 5),))
case("bmm with a constant left", lambda x, c: torch.bmm(c, x), X, passive=(random(2, 5, 3),))
case("bmm with itself", lambda x: torch.bmm(x, x.transpose(1, 2)), X)
case("bmm of a square", lambda x: torch.bmm(x, x), random(2, 3, 3))

# Choices
case("cat of two", lambda x, y: torch.cat([x, y]), X, Y)
case("cat at the end", lambda x, y: torch.cat([x, y[..., 1:]], -1), X, Y)
case("cat with a constant", lambda x, c: torch.cat([c, x, c], dim=1), X, passive=(Y,))
case("cat with itself", lambda x: torch.cat([x, x], 2), X)
case("where", lambda x, y, m: torch.where(m, x, y), X, Y, passive=(MASK,))
case("where with a constant left", lambda x, c, m: torch.where(m, c, x), X, passive=(Y, MASK))
case("where with a constant right", lambda x, c, m: torch.where(m, x, c), X, passive=(Y, MASK))
case("where of a row and a column", lambda x, y, m: torch.where(m, x, y), ROW, COLUMN, passive=(MASK,))
case("where that spreads", lambda x, c, m: torch.where(m, x, c), ROW, passive=(Y, MASK[:, :1]))
case("where with a small constant", lambda x, m, c: torch.where(m, x, c), X, passive=(MASK, FLAT[:1]))
case("masked_fill", lambda x, m: x.masked_fill(m, -3.0), X, passive=(MASK,))
case("masked_fill that spreads", lambda x, m: x.masked_fill(m, 2.0), ROW, passive=(MASK,))

case("minimum", torch.minimum, X, Y)
case("maximum with a constant", torch.maximum, X, passive=(FLAT,))
case("minimum of a row and a column", torch.minimum, ROW, COLUMN)
case("where more than a number", lambda x: torch.where(x > 0.3, x * x, 2 * x), X)
case("where less than a number", lambda x: torch.where(x < 0.3, x * x, 2 * x), X)
case("where less than another", lambda x, y: torch.where(x < y, x * x, y), X, Y)
case("where more than a constant", lambda x, c: torch.where(x > c, x * x, c), X, passive=(Y,))
case(
    "scatter of positions into a constant",
    lambda x, i: x * torch.full_like(x, 0.5).scatter(2, i, 2),
    X,
    passive=(torch.tensor([[[3, 0]], [[1, 2]]]),),
)
INDICES = torch.tensor([[[3, 0]], [[1, 2]]]).expand(2, 3, 2)
case(
    "scatter of a number",
    lambda x, i: torch.tanh(x).scatter(2, i, -0.5) * x,
    X,
    passive=(INDICES.contiguous(),),
)
case("gather after a factor", lambda x, i: (torch.tanh(x) * 3).gather(2, i), X, passive=(INDICES,))
case("topk", lambda x: (lambda v, i: v * torch.sigmoid(x).gather(-1, i))(*torch.topk(x, 2)), X)
case("topk after a factor", lambda x: torch.topk(torch.tanh(x) * 3, 3, dim=-1)[0], X)

# Elementwise functions, alone and with delayed factors.
ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "reciprocal": torch.reciprocal,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "relu": F.relu,
    "abs": torch.abs,
    "erf": torch.erf,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "clamp": lambda x: x.clamp(-0.4, 0.9),
    "clamp below": lambda x: x.clamp(max=0.9),
    "clamp_min": lambda x: x.clamp_min(0.3),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 1.3),
    "celu": lambda x: aten.elu.default(x, 1.5, 2.0, 0.5),
    "square": lambda x: x**2,
    "cube": lambda x: x**3,
    "root": lambda x: x**0.5,
    "negative power": lambda x: x**-1.5,
}
NEEDS_POSITIVE = {"log", "log1p", "sqrt", "rsqrt", "root", "negative power"}
for name, function in ELEMENTWISE.items():
    # Values from 0.2 to 1.8, or of both signs
    middle = 1.0 if name in NEEDS_POSITIVE else 0.1

    def after_factors(x: torch.Tensor, f: Any = function, middle: float = middle) -> torch.Tensor:
        return f(torch.tanh(x) * 0.8 + middle) * 3 * x

    case(name, function, positive(2, 3) if name in NEEDS_POSITIVE else random(2, 3))
    case(f"{name} after a factor", after_factors, X)
case("tanh form of gelu", lambda x: F.gelu(x, approximate="tanh"), X)

# Functions of a row
for dim in (0, 1, -1):
    case(f"softmax over {dim}", lambda x, dim=dim: torch.softmax(x, dim), X)
case("log_softmax", lambda x: aten._log_softmax.default(x, -1, False), X)
case("log_softmax over 1", lambda x: aten._log_softmax.default(x, 1, False), X)
case("softmax in another type", lambda x: torch.softmax(x, -1, dtype=x.dtype), X)
case("softmax after a factor", lambda x: torch.softmax(torch.tanh(x) * 3, 1), X)
SHIFT_AND_INDEX = random(2, 3, 1), torch.tensor([[[3], [0], [1]], [[2], [2], [0]]])
case("parts of a softmax", SOFTMAX_PARTS, X, passive=SHIFT_AND_INDEX)
case("of a factor", lambda x, s, i: SOFTMAX_PARTS(torch.tanh(x) * 3, s, i), X, passive=SHIFT_AND_INDEX)
case(
    "of a layer with bias",
    lambda x, s, i, w, b: SOFTMAX_PARTS(F.linear(x, w, b), s, i),
    X,
    passive=(*SHIFT_AND_INDEX, random(5, 4), random(5)),
)
PARTS = random(2, 3, 5), random(2, 3, 4, seed=1), random(2, 5, 6, seed=2), random(2, 4, 6, seed=3)
case("logsumexp", lambda x: x.logsumexp(-1), X)
case("logsumexp after a factor", lambda x: torch.tanh(x).logsumexp(-1, keepdim=True) * x, X)
case("mixture of two parts", MIXED_PARTS, *PARTS)
TABLES = [relation("behind", 5, 1, None), relation("behind", 5, 0, 1)]
TABLES += [relation("halves", 5, size, None) for size in (1, 2, 4)]
case(
    "inverse of a triangle",
    lambda x, before, one, *halves: UNIT_INVERSE(torch.tanh(x) * before, one, halves),
    random(2, 5, 5),
    passive=tuple(torch.from_numpy(each).double() for each in TABLES),
)
case("of factors", lambda s, t, v, w: MIXED_PARTS(torch.tanh(s), 2 * t, v.tanh(), 3 * w.tanh()), *PARTS)


# Chains in which factors are delayed further


class Mixed(nn.Module):
    """Linear with bias, gelu, product, softmax, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = linear(4, 6), linear(4, 6), linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.softmax(F.gelu(self.first(x)) * self.gate(x), -1)) + x


class Attention(nn.Module):
    """Grouped products of rotated states, soft cap, mask, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = linear(4, 8), linear(4, 8), linear(4, 8, bias=False)
        self.register_buffer("mask", torch.full((3, 3), -3e4).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).view(2, 3, 2, 4).transpose(1, 2).reshape(4, 3, 4)
            for layer in (self.query, self.key, self.value)
        )
        rotated = torch.cat([-query[..., 2:], query[..., :2]], -1)
        scores = torch.bmm(query * 0.3 + rotated * 0.7, key.transpose(1, 2))
        scores = torch.tanh(scores / 5.0) * 5.0 + self.mask
        mixed = torch.bmm(torch.softmax(scores, -1), value)
        return mixed.reshape(2, 2, 3, 4).transpose(1, 2).flatten(2)


def with_random_scale(norm: nn.LayerNorm) -> nn.LayerNorm:
    norm.weight.data, norm.bias.data = random(4, seed=3), random(4, seed=4)
    return norm


def shared(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Use the output of one layer as a whole, in parts and reshaped."""
    hidden = F.linear(x, w, b)
    return hidden.reshape(6, 5).sum(0) + torch.cat([hidden[:, 1:], hidden[:, :1]], 1) * F.silu(hidden)


def rms_norm(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * c


case("bias, gelu, product, softmax, linear", Mixed(), X)
case("attention", Attention(), X)
case("layer norm", with_random_scale(nn.LayerNorm(4)), X)
case("layer norm after a bias", nn.Sequential(linear(4, 4), nn.LayerNorm(4)), X)
case("mean square norm", rms_norm, X, passive=(FLAT,))
case("one bias in many places", shared, X, passive=(random(5, 4), random(5)))
case("layers with biases only", nn.Sequential(linear(4, 5), linear(5, 3), linear(3, 4)), X)
case("bias, relu, bias", nn.Sequential(linear(4, 5), nn.ReLU(), linear(5, 3)), X)
case(
    "select, split, chunk",
    lambda x: x[:, 1] * x.split(1, 1)[0][:, 0] + x.chunk(2)[1][0, 0],
    X,
)


USED: set[str] = set()


@pytest.fixture(autouse=True)
def recorded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record which rows are looked up."""

    def recorder(target: Any) -> Operator | None:
        USED.add(str(target))
        return row_of(target)

    monkeypatch.setattr(transform, "row_of", recorder)


def compare(case: Case, queries: int = 3, graph: GraphModule | None = None) -> None:
    """Compare outputs and tangents in both precisions with PyTorch's in float64."""
    graph = graph or differentiated(case, queries)
    tangents = directions(case.active, queries)
    expected = jvp(case.module, case.active, case.passive, tangents)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        graph.to(dtype)
        inputs = (
            tensor.to(dtype) if tensor.is_floating_point() else tensor
            for tensor in (*case.active, *case.passive, *tangents)
        )
        with torch.no_grad():
            outputs = graph(*inputs)
        for actual, reference in zip(outputs, expected, strict=True):
            assert actual.dtype == dtype
            assert relative_difference(actual, reference) < tolerance


def differentiated(case: Case, queries: int = 3) -> GraphModule:
    return with_tangents(case.module, case.active, case.passive, queries)


@cache
def case_graph(name: str) -> GraphModule:
    return differentiated(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_rule_is_the_derivative(name: str) -> None:
    compare(CASES[name], graph=case_graph(name))


@pytest.mark.parametrize("queries", [1, 2, 7])
@pytest.mark.parametrize("name", ["attention", "one bias in many places", "where that spreads"])
def test_any_number_of_queries(name: str, queries: int) -> None:
    compare(CASES[name], queries)


@pytest.mark.parametrize(
    "name",
    [
        "x * x",
        "large * small",
        "softmax over 0",
        "parts of a softmax",
        "attention",
        "layer norm after a bias",
        "mean square norm",
        "one bias in many places",
        "cat with a constant",
        "where that spreads",
        "small + large constant",
    ],
)
@pytest.mark.parametrize("tokens", [3, 5])
def test_a_block_has_the_same_derivative_whatever_dimension_is_its_tokens(name: str, tokens: int) -> None:
    case, queries = CASES[name], 2
    graph_module = rewritten_graph(case.module, (*case.active, *case.passive))
    names = inputs_of(graph_module)[: len(case.active)]
    graph = differentiate(graph_module, dict.fromkeys(names, Dense()), queries, {ONES: tokens}).double()
    tangents = directions(case.active, queries)
    takes_ones = ONES in inputs_of(graph)
    ones = torch.ones(1, tokens, 1).double()
    with torch.no_grad():
        outputs = graph(*case.active, *case.passive, *[ones] * takes_ones, *tangents)
    for actual, reference in zip(outputs, jvp(case.module, case.active, case.passive, tangents), strict=True):
        assert relative_difference(actual, reference) < 1e-12


# Broadcasting and dimensions at random


SHAPES = {"min_dims": 1, "max_dims": 4, "min_side": 1, "max_side": 3}
SOME = settings(max_examples=25, derandomize=True)


@SOME
@given(
    st.sampled_from(sorted(OPERATORS)),
    mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3),
    st.sampled_from(["both", "left", "right"]),
)
def test_broadcasting(sign: str, shapes: BroadcastableShapes, side: str) -> None:
    operate = OPERATORS[sign]
    left, right = (positive(*shape, seed=seed) for seed, shape in enumerate(shapes.input_shapes))
    if side == "both":
        compare(Case(Function(operate), (left, right)))
    elif side == "left":
        compare(Case(Function(operate), (left,), (right,)))
    else:
        compare(Case(Function(lambda x, c: operate(c, x)), (right,), (left,)))


@SOME
@given(
    mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=3),
    st.sampled_from(["both", "left", "right"]),
)
def test_broadcasting_of_where(shapes: BroadcastableShapes, side: str) -> None:
    left, right, mask = (random(*shape, seed=seed) for seed, shape in enumerate(shapes.input_shapes))
    if side == "both":
        compare(Case(Function(lambda x, y, m: torch.where(m > 0, x, y)), (left, right), (mask,)))
    elif side == "left":
        compare(Case(Function(lambda x, c, m: torch.where(m > 0, x, c)), (left,), (right, mask)))
    else:
        compare(Case(Function(lambda x, c, m: torch.where(m > 0, c, x)), (right,), (left, mask)))


@SOME
@given(array_shapes(**SHAPES), st.data())
def test_dimensions(shape: tuple[int, ...], data: st.DataObject) -> None:
    dims = st.integers(-len(shape), len(shape) - 1)
    first, second, third = data.draw(dims), data.draw(dims), data.draw(dims)
    keep = data.draw(st.booleans())

    function = data.draw(
        st.sampled_from(
            [
                lambda x: torch.tanh(x).mean(first, keepdim=keep),
                lambda x: torch.softmax(x * x, first).transpose(first, second).unsqueeze(third),
                lambda x: torch.cat([x, x * x], second).sum([first], keepdim=keep),
                lambda x: x[:1].squeeze(second).exp(),
            ]
        )
    )
    compare(Case(Function(function), (random(*shape),)))


# Derivatives at the limits of floats


@pytest.mark.parametrize("function", [F.relu, F.gelu, F.silu, torch.sigmoid, torch.tanh])
def test_zero_and_large_magnitudes(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    values = [0.0, 1e-10, 1e-5, 1.0, 6.0, 20.0, 100.0, 1e4, 1e10, 1e18, 1e38]
    x = torch.tensor([sign * value for sign in (1, -1) for value in values], dtype=torch.float32)
    tangents = (torch.ones(2, *x.shape),)
    graph = with_tangents(Function(function), (x,), queries=2)
    with torch.no_grad():
        output, output_tangents = graph(x, *tangents)
    expected, derivatives = jvp(Function(function), (x.double(),), (), (tangents[0].double(),))
    torch.testing.assert_close(output, expected.float())
    torch.testing.assert_close(output_tangents, derivatives.float(), atol=1e-6, rtol=1e-5)


def test_relu_is_flat_at_zero_like_that_of_pytorch() -> None:
    graph = with_tangents(nn.ReLU(), (torch.zeros(2),), queries=1)
    assert graph(torch.tensor([0.0, -0.0]), torch.ones(1, 2))[1].tolist() == [[0.0, 0.0]]


# Quantized layers: rounding has no derivative, so tangents are rounded like the primal


@cache
def quantized_layers() -> tuple[nn.Linear, nn.Linear]:
    """Return the same quantized layer with a bias and without."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_

    layers = linear(32, 6).float(), linear(32, 6, bias=False).float()
    for layer in layers:
        layer.requires_grad_(False)
        quantize_(layer, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4))
    return layers


@cache
def quantized_graph() -> GraphModule:
    return with_tangents(quantized_layers()[0], (random(2, 3, 32).float(),))


def test_every_row_of_a_tangent_has_its_own_scale() -> None:
    graph, (layer, unbiased) = quantized_graph(), quantized_layers()
    x = random(2, 3, 32).float()
    tangents = random(3, 2, 3, 32, seed=1).float() * torch.logspace(-3, 3, 18).reshape(3, 2, 3, 1)
    with torch.no_grad():
        output, output_tangents = graph(x, tangents)
        torch.testing.assert_close(output, layer(x))
        torch.testing.assert_close(output_tangents, unbiased(tangents))
        # A power of 2 scales floats exactly, including codes.
        assert torch.equal(graph(x, tangents * 1024)[1], output_tangents * 1024)


def test_every_rule_is_tested() -> None:
    for name in CASES:
        case_graph(name)
    quantized_graph()
    assert differentiable() <= USED
