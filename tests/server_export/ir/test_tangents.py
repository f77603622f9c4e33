"""What a graph of values with tangents writes once, and what a value puts off until later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from server_export.ir.tangents import Dual, Interleaved, Tangents
from tests.server_export.derive.tangent.graphs import (
    QUERIES,
    TOKENS,
    Function,
    placeholders,
    random,
    run,
    shapes_of,
    with_tangents,
)

aten = torch.ops.aten


def test_a_shape_that_a_value_has_is_not_written_again(tangents: Tangents) -> None:
    (x,) = placeholders(tangents, x=random(2, 3))
    assert tangents.reshape(x, [2, 3]) is x
    flat = tangents.reshape(x, [6])
    assert tangents.reshape(x, [6]) is flat
    assert tangents.reshape(flat, [2, 3]) is x
    assert torch.equal(run(tangents, flat, random(2, 3)), random(2, 3).reshape(6))


def test_products_with_numbers_and_with_nothing(tangents: Tangents) -> None:
    (x,) = placeholders(tangents, x=torch.ones(1))
    assert tangents.product(None, x) is x
    assert tangents.product(2, None) == 2
    assert tangents.product(2, 3) == 6
    assert run(tangents, tangents.product(2, x), torch.tensor([4.0])).tolist() == [8.0]


def test_equal_constants_are_read_once(tangents: Tangents) -> None:
    assert tangents.constant(torch.ones(1, 4)) is tangents.constant(torch.ones(1, 4))
    assert tangents.constant(torch.ones(1, 4)) is not tangents.constant(torch.ones(4, 1))
    assert tangents.constant(torch.zeros(1, 4)) is not tangents.constant(torch.ones(1, 4))


def test_a_sum_over_the_tokens_has_no_constant_of_their_number(tangents: Tangents) -> None:
    value = random(2, 3, TOKENS, dtype=torch.float32)
    (x,) = placeholders(tangents, x=value)
    total = run(tangents, tangents.total(x), value)
    assert not tangents.graph.find_nodes(op="get_attr")
    torch.testing.assert_close(total, value.sum(-1, keepdim=True))


@pytest.mark.parametrize(("width", "layers"), [(1024, 1), (1031, 1), (2048, 2), (3 * 1024, 2), (2**21, 3)])
def test_long_sum_is_taken_in_parts(tangents: Tangents, width: int, layers: int) -> None:
    value = random(2, width, dtype=torch.float32)
    (x,) = placeholders(tangents, x=value)
    total = run(tangents, tangents.total(x), value)
    torch.testing.assert_close(total, value.sum(1, keepdim=True), rtol=1e-5, atol=1e-3)
    weights = [node.args[1] for node in tangents.graph.nodes if node.target is aten.linear.default]
    assert len(weights) == layers


def wide_operators(module: nn.Module) -> int:
    """How many operators of a module's graph work on all tangents of a [2, 4] input."""
    graph = with_tangents(module, (random(2, 4),), queries=QUERIES)
    shapes = shapes_of(graph, (random(2, 4), random(QUERIES, 2, 4)))
    return sum(node.op == "call_function" and shape[0] >= QUERIES for node, shape in shapes.items())


def test_bias_and_derivative_cost_the_value_alone() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).double()
    # Of each layer one, and the derivative meets the tangents once, right before the next layer.
    assert wide_operators(layers) == 3


def test_derivatives_are_multiplied_before_they_meet_the_tangents() -> None:
    assert wide_operators(Function(lambda x: torch.tanh(torch.exp(x) * 3).sigmoid())) == 1


def test_constants_are_added_to_the_value_alone() -> None:
    assert wide_operators(Function(lambda x: (x + 1) - 2 + 3)) == 0


FORMS = ("plain", "with a factor", "interleaved", "interleaved as it lies")


def dual_in(form: str, tangents: Tangents, value: torch.Tensor) -> tuple[Dual, tuple[torch.Tensor, ...]]:
    """A dual of value and tangents `value` [1 + queries, *shape] in one form, and the inputs of its graph."""
    shape, primal, moved = value.shape[1:], value[:1], value[1:]
    factor = torch.full_like(primal, 2)
    if form == "with a factor":
        moved = moved / 2
    elif form.startswith("interleaved"):
        moved = moved.movedim(0, -2)
    if form == "interleaved as it lies":
        moved = moved.reshape(*shape[:-1], -1)
    inputs = primal, moved, factor
    one, other, third = placeholders(tangents, one=primal, other=moved, third=factor)
    if form.startswith("interleaved"):
        return Interleaved(tangents, one, other), inputs
    return Dual(tangents, one, other, third if form == "with a factor" else None), inputs


@pytest.mark.parametrize("form", FORMS)
def test_what_is_made_of_a_form_is_what_is_made_of_its_numbers(tangents: Tangents, form: str) -> None:
    value = random(1 + QUERIES, 2, 3)
    dual, inputs = dual_in(form, tangents, value)
    negative = dual.each(lambda part, _: tangents.call(aten.neg.default, part))
    forms = {
        "itself": dual,
        "reshaped": dual.reshaped((3, 2)),
        "aligned": dual.aligned(3),
        "each": negative,
        "scaled": dual.scaled(negative.primal, 3),
        "scaled by nothing": dual.scaled(negative.primal),
        "interleaved": Interleaved.of(dual),
    }
    nodes = {name: (made.primal, made.tangents) for name, made in forms.items()}
    numbers = {name: torch.cat(parts) for name, parts in run(tangents, nodes, *inputs).items()}
    expected = {
        "itself": value,
        "reshaped": value.reshape(-1, 3, 2),
        "aligned": value.reshape(-1, 1, 2, 3),
        "each": -value,
        "scaled": torch.cat([-value[:1], 3 * value[1:]]),
        "scaled by nothing": torch.cat([-value[:1], value[1:]]),
        "interleaved": value,
    }
    torch.testing.assert_close(numbers, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_value_meets_interleaved_tangents_as_they_lie(tangents: Tangents, form: str) -> None:
    value = random(1 + QUERIES, 2, 3)
    dual, inputs = dual_in(form, tangents, value)
    found = Interleaved.of(dual)
    one, meeting = found.meeting(found.primal)
    assert Interleaved.of(found) is found
    inside, product = run(tangents, (found.inside, tangents.product(one, meeting)), *inputs)
    assert product.shape == (2, QUERIES, 3)
    torch.testing.assert_close(inside, value[1:].movedim(0, -2))
    torch.testing.assert_close(product, value[0].unsqueeze(1) * inside)


def test_interleaved_tangents_follow_a_reshape_that_leaves_the_last_dimension(tangents: Tangents) -> None:
    value = random(1 + QUERIES, 2, 3, 4)
    dual, inputs = dual_in("interleaved", tangents, value)
    kept, turned = dual.reshaped((6, 4)), dual.reshaped((2, 12))
    assert isinstance(kept, Interleaved) and not isinstance(turned, Interleaved)
    found = run(tangents, (kept.tangents, turned.tangents), *inputs)
    assert torch.equal(found[0], value[1:].reshape(-1, 6, 4))
    assert torch.equal(found[1], value[1:].reshape(-1, 2, 12))


def test_tangents_are_made_once(tangents: Tangents) -> None:
    dual, _ = dual_in("with a factor", tangents, random(1 + QUERIES, 2, 3))
    assert dual.tangents is dual.tangents
    assert dual.scaled(dual.primal).unscaled is dual.unscaled
