"""What a value with tangents puts off, and that putting it off saves work."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from server_export.derive.tangent.builder import Builder
from server_export.derive.tangent.dual import Behind, Biased, Dual, Interleaved, Parts, Scaled, Stacked
from tests.server_export.derive.tangent.graphs import (
    QUERIES,
    Function,
    placeholders,
    random,
    run,
    shapes_of,
    with_tangents,
)

aten = torch.ops.aten


def wide_operators(module: nn.Module) -> list[str]:
    """Names of the operators of a module's graph that work on all tangents of a [2, 4] input."""
    graph = with_tangents(module, (random(2, 4),), queries=QUERIES)
    shapes = shapes_of(graph, (random(2, 4), random(QUERIES, 2, 4)))
    return [
        str(node.target).split(".")[1]
        for node, shape in shapes.items()
        if node.op == "call_function" and shape[0] >= QUERIES
    ]


def test_bias_and_slope_cost_one_slot() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).double()
    # The slope meets the tangents once, right before the slots are joined for the next layer.
    assert wide_operators(layers) == ["cat", "linear", "slice", "mul", "cat", "linear", "slice"]


def test_slopes_are_multiplied_before_they_meet_the_tangents() -> None:
    assert wide_operators(Function(lambda x: torch.tanh(torch.exp(x) * 3).sigmoid())) == ["mul"]


def test_constants_are_added_to_the_primal_alone() -> None:
    assert wide_operators(Function(lambda x: (x + 1) - 2 + 3)) == []


def test_bias_of_a_value_that_is_needed_whole_is_padded_with_zeros() -> None:
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    found = wide_operators(Function(lambda x: first(x) + second(x)))
    assert found == ["cat", "linear", "linear", "add", "add", "add", "slice"]


FORMS = ("parts", "parts with a factor", "stacked", "biased", "scaled", "behind", "interleaved")


def dual_in(form: str, builder: Builder, value: torch.Tensor) -> tuple[Dual, tuple[torch.Tensor, ...]]:
    """A dual of all slots `value` [1 + queries, *shape] in one form, and the inputs of its graph."""
    shape, primal, tangents = tuple(value.shape[1:]), value[:1], value[1:]
    one, other, third = placeholders(builder, "one", "other", "third")
    if form == "parts":
        return Parts(builder, shape, one, other), (primal, tangents, primal)
    if form == "parts with a factor":
        return Parts(builder, shape, one, other, third), (primal, tangents / 2, torch.full_like(primal, 2))
    if form == "stacked":
        return Stacked(builder, shape, one), (value, primal, primal)
    if form == "biased":
        bias = random(shape[-1], seed=3)
        builder.graph_module.register_buffer("bias", bias)
        lacking = torch.cat([primal - bias, tangents])
        return Biased(builder, shape, one, builder.graph.get_attr("bias")), (lacking, primal, primal)
    if form == "scaled":
        return Scaled(builder, shape, one, 2), (torch.cat([primal, tangents / 2]), primal, primal)
    if form == "behind":
        slots = torch.cat([torch.full_like(primal, torch.nan), tangents / 2])
        return Behind(builder, shape, one, other, 2), (primal, slots, primal)
    inside = builder.know_shape(other, *shape[:-1], builder.queries, shape[-1])
    return Interleaved(builder, shape, one, inside), (primal, tangents.movedim(0, -2), primal)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", [("primal", "tangents", "stack"), ("stack", "tangents", "primal")])
def test_every_form_holds_the_same_numbers(builder: Builder, form: str, order: tuple[str, ...]) -> None:
    value = random(1 + QUERIES, 2, 3)
    dual, inputs = dual_in(form, builder, value)
    nodes = {name: getattr(dual, name) for name in order}
    numbers = run(builder, nodes, *inputs)
    torch.testing.assert_close(numbers, {"primal": value[:1], "tangents": value[1:], "stack": value})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stack_is_made", [False, True])
def test_what_is_made_of_a_form_is_what_is_made_of_its_numbers(
    builder: Builder, form: str, stack_is_made: bool
) -> None:
    value = random(1 + QUERIES, 2, 3)
    dual, inputs = dual_in(form, builder, value)
    if stack_is_made:
        assert dual.stack is dual.stack
    negative = dual.each((2, 3), lambda slots, _: builder.call(aten.neg.default, slots))
    forms = {
        "reshaped": dual.reshaped((3, 2)),
        "aligned": dual.aligned(3),
        "each": negative,
        "behind": dual.behind(negative.primal, 3),
        "interleaved": Interleaved.of(dual),
    }
    numbers = run(builder, {name: made.stack for name, made in forms.items()}, *inputs)
    expected = {
        "reshaped": value.reshape(-1, 3, 2),
        "aligned": value.reshape(-1, 1, 2, 3),
        "each": -value,
        "behind": torch.cat([-value[:1], 3 * value[1:]]),
        "interleaved": value,
    }
    torch.testing.assert_close(numbers, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stack_is_made", [False, True])
def test_slots_are_the_tangents_before_their_factor(builder: Builder, form: str, stack_is_made: bool) -> None:
    value = random(1 + QUERIES, 2, 3)
    dual, inputs = dual_in(form, builder, value)
    if stack_is_made:
        assert dual.stack is dual.stack
    slots, factor = dual.slots, dual.factor
    if slots is not None:
        tangents = builder.product(factor, builder.call(aten.slice.Tensor, slots, 0, 1, 1 + QUERIES))
        torch.testing.assert_close(run(builder, tangents, *inputs), value[1:])
    else:
        assert "parts" in form or form == "interleaved"


def test_forms_are_made_once(builder: Builder) -> None:
    (stack,) = placeholders(builder, "stack")
    dual = Stacked(builder, (3,), stack)
    assert dual.stack is stack
    assert dual.primal is dual.primal
    assert dual.tangents is dual.unscaled
    assert len(builder.graph.nodes) == 3


@pytest.mark.parametrize("is_stacked", [True, False])
def test_interleaved_tangents_are_the_same_numbers(builder: Builder, is_stacked: bool) -> None:
    whole, primal, tangents = placeholders(builder, "whole", "primal", "tangents")
    dual = Stacked(builder, (2, 3), whole) if is_stacked else Parts(builder, (2, 3), primal, tangents)
    value = random(1 + QUERIES, 2, 3)
    found = Interleaved.of(dual)
    beside, meeting, _ = found.beside(found.primal)
    parts = found.inside, beside, meeting, found.stack, found.tangents, found.primal
    inside, beside, meeting, stack, tangents, primal = run(builder, parts, value, value[:1], value[1:])
    assert torch.equal(inside, value[1:].permute(1, 0, 2))
    assert torch.equal(beside * meeting, value[0].reshape(2, 1, 3) * inside)
    assert torch.equal(stack, value)
    assert torch.equal(tangents, value[1:])
    assert torch.equal(primal, value[:1])
    assert Interleaved.of(found) is found


@pytest.mark.parametrize("queries", [1, QUERIES])
def test_a_primal_meets_interleaved_tangents_as_a_product_left_them(queries: int) -> None:
    builder = Builder(GraphModule(nn.Module(), Graph()), Graph(), queries)
    primal, lying = placeholders(builder, "primal", "lying")
    builder.know_shape(lying, 6, queries * 4)
    dual = Interleaved(builder, (2, 3, 4), primal, lying)
    beside, meeting, shape = dual.beside(dual.primal)
    assert shape == ((6, 4) if queries == 1 else (6, queries, 4))
    assert (meeting is lying) == (queries == 1)
    value, tangents = random(1, 2, 3, 4), random(6, queries * 4, seed=1)
    product = run(builder, builder.product(beside, meeting), value, tangents)
    expected = value.reshape(6, 1, 4) * tangents.reshape(6, queries, 4)
    assert torch.equal(product.reshape(6, queries, 4), expected)


def test_interleaved_tangents_follow_a_reshape(builder: Builder) -> None:
    primal, inside = placeholders(builder, "primal", "inside")
    dual = Interleaved(builder, (2, 3, 4), primal, inside)
    builder.know_shape(inside, 2, 3, QUERIES, 4)
    kept, turned = dual.reshaped((6, 4)), dual.reshaped((2, 12))
    assert isinstance(kept, Interleaved)
    value = random(1 + QUERIES, 2, 3, 4)
    stacks = run(builder, (kept.stack, turned.stack), value[:1], value[1:].permute(1, 2, 0, 3))
    assert torch.equal(stacks[0], value.reshape(-1, 6, 4))
    assert torch.equal(stacks[1], value.reshape(-1, 2, 12))
