"""A new operator is a row in the table, where passes find everything that they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from server_export.check.engine import bind_method
from server_export.derive.backward.joint import backpropagate
from server_export.derive.jvp.transform import ONES, Dense, differentiate
from server_export.ir.decomposition import unknown_operators
from server_export.ir.operators import TABLE, Category, differentiable, members, row, row_of, rules
from server_export.ir.rewriting import rewritten_graph
from server_export.ir.writer import Calls, GraphWriter
from server_export.lower.program import write_program
from tests.server_export.derive.jvp.graphs import (
    Function,
    directions,
    inputs_of,
    jvp,
    random,
    relative_difference,
    with_tangents,
)

torch.set_num_threads(1)
aten = torch.ops.aten

ROWS, WIDTH, QUERIES = 3, 5, 2
X = random(ROWS, WIDTH, dtype=torch.float32)


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """Restore the rows of the table after a test has added some."""
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


# A composite operator of PyTorch


def test_an_operator_without_a_row_has_no_derivative() -> None:
    graph_module = rewritten_graph(Function(torch.log2), (X.exp(),))
    assert [*unknown_operators(graph_module)] == ["aten.log2.default"]


def test_an_operator_with_a_rewrite_rule_needs_nothing_else() -> None:
    def log2(writer: GraphWriter, node: Node, x: Node) -> Node:
        return writer.times(writer.call(aten.log.default, x), 1.4426950408889634)

    row(aten.log2.default, category=Category.ELEMENTWISE, rewrite=log2)

    graph_module = rewritten_graph(Function(torch.log2), (X.exp(),))
    assert not unknown_operators(graph_module)
    torch.testing.assert_close(graph_module(X.exp()), torch.log2(X.exp()))
    assert_differentiated(Function(torch.log2), X.exp())


# An operator that stays whole and has its own derivative


@torch.library.custom_op("tests::bump", mutates_args=())
def bump(x: torch.Tensor) -> torch.Tensor:
    """Return exp(-x^2), as a library operator without a derivative."""
    return torch.exp(-x * x)


@bump.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Bumps(torch.nn.Module):
    """A linear layer followed by the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", random(WIDTH, WIDTH, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = bump(torch.nn.functional.linear(x, self.weight))
        return result


class InPyTorch(Bumps):
    """The same function in operators that PyTorch can differentiate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(-(torch.nn.functional.linear(x, self.weight) ** 2))


def derivative(w: Calls, x: Any, y: Any) -> Any:
    """Return -2 x y for the argument x and the result y."""
    return w.times(w.times(x, y), -2.0)


def in_core(writer: GraphWriter, node: Node, x: Node) -> Node:
    return writer.exp(writer.negative(writer.times(x, x)))


def test_one_row_provides_jvp_backward_pass_and_core_operators(tmp_path: Path) -> None:
    target = torch.ops.tests.bump.default
    row(target, category=Category.ELEMENTWISE, derivative=derivative, core=in_core)

    assert_differentiated(Bumps(), X, like=InPyTorch())

    # The lowered graph no longer has the operator, which the engine doesn't know.
    graphs = {"forward": Bumps(), "jvp": forward_mode(Bumps(), X), "backward": backward(Bumps(), X)}
    inputs = {"forward": (X,), "jvp": (X, *directions((X,), QUERIES)), "backward": (X, X)}
    path = tmp_path / "program.pte"
    write_program(path, {name: (graph, inputs[name]) for name, graph in graphs.items()})
    for name, graph in graphs.items():
        outputs = bind_method(path, name, inputs[name])()
        expected = graph(*inputs[name])
        expected = expected if isinstance(expected, tuple) else (expected,)
        for actual, expected_output in zip(outputs, expected, strict=True):
            torch.testing.assert_close(actual, expected_output, atol=1e-5, rtol=1e-4)


def test_a_row_may_have_its_own_jvp_rule() -> None:
    """An operator that isn't elementwise has a rule from values with tangents to one."""
    torch.library.define("tests::twice", "(Tensor x) -> Tensor")
    torch.library.impl("tests::twice", "CompositeExplicitAutograd")(lambda x: 2 * x)
    row(
        torch.ops.tests.twice.default,
        category=Category.ARITHMETIC,
        jvp=lambda tangents, node, x: x.map(lambda part, count: tangents.times(part, 2.0)),
    )

    graph = with_tangents(Function(torch.ops.tests.twice), (X,))
    value, tangents = graph(X, *directions((X,), 3))
    assert torch.equal(value, 2 * X)
    assert torch.equal(tangents, 2 * directions((X,), 3)[0])


# The table


def test_no_operator_has_two_rows() -> None:
    with pytest.raises(ValueError, match="already has a row"):
        row(aten.exp.default, category=Category.ELEMENTWISE)


def test_a_row_holds_everything_about_an_operator() -> None:
    operator = row_of(aten.silu.default)
    assert operator is not None and operator.category is Category.ELEMENTWISE
    assert rules("core")["aten.silu.default"] is operator.core
    assert "aten.silu.default" not in rules("rewrite")
    assert "aten.silu.default" in differentiable()
    assert row_of(aten.fft_fft.default) is None


def test_members_returns_the_operators_of_categories() -> None:
    assert members(Category.RESHAPE) == {aten.reshape.default, aten.view.default, aten._unsafe_view.default}
    assert aten.exp.default in members(Category.ELEMENTWISE, Category.RESHAPE)


def forward_mode(module: torch.nn.Module, x: torch.Tensor) -> GraphModule:
    graph_module = rewritten_graph(module, (x,))
    (name,) = inputs_of(graph_module)
    return differentiate(graph_module, {name: Dense()}, QUERIES, {ONES: 7})


def backward(module: torch.nn.Module, x: torch.Tensor) -> GraphModule:
    graph_module = rewritten_graph(module, (x,))
    return backpropagate(graph_module, inputs_of(graph_module), [], tokens=7)


def assert_differentiated(
    module: torch.nn.Module, x: torch.Tensor, like: torch.nn.Module | None = None
) -> None:
    """Assert that JVP and backward pass are those of PyTorch for the module, or for `like`."""
    like, along = like or module, directions((x,), QUERIES)
    for actual, expected_output in zip(
        forward_mode(module, x)(x, *along), jvp(like, (x,), (), along), strict=True
    ):
        assert relative_difference(actual, expected_output) < 1e-5
    grad_output = random(*x.shape, seed=1, dtype=torch.float32)
    differentiated = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(like(differentiated), differentiated, grad_output)
    (outputs,) = backward(module, x)(x, grad_output)
    assert relative_difference(outputs, expected) < 1e-5
