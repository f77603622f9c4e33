"""What a value with tangents puts off, and that putting it off saves work."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from server_export.derive.tangent.builder import Builder
from server_export.derive.tangent.dual import Dual, Interleaved
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


def test_bias_and_slope_cost_the_value_alone() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).double()
    # The slope meets the tangents once, right before the next layer.
    assert wide_operators(layers) == ["linear", "mul", "linear"]


def test_slopes_are_multiplied_before_they_meet_the_tangents() -> None:
    assert wide_operators(Function(lambda x: torch.tanh(torch.exp(x) * 3).sigmoid())) == ["mul"]


def test_constants_are_added_to_the_value_alone() -> None:
    assert wide_operators(Function(lambda x: (x + 1) - 2 + 3)) == []


FORMS = ("plain", "with a factor", "interleaved", "interleaved as it lies")


def dual_in(form: str, builder: Builder, value: torch.Tensor) -> tuple[Dual, tuple[torch.Tensor, ...]]:
    """A dual of value and tangents `value` [1 + queries, *shape] in one form, and the inputs of its graph."""
    shape, primal, tangents = tuple(value.shape[1:]), value[:1], value[1:]
    one, other, third = placeholders(builder, "one", "other", "third")
    if form == "plain":
        return Dual(builder, shape, one, other), (primal, tangents, primal)
    if form == "with a factor":
        return Dual(builder, shape, one, other, third), (primal, tangents / 2, torch.full_like(primal, 2))
    inside = tangents.movedim(0, -2)
    if form == "interleaved as it lies":
        inside = inside.reshape(*shape[:-1], -1)
    builder.know_shape(other, *inside.shape)
    return Interleaved(builder, shape, one, other), (primal, inside, primal)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_made_of_a_form_is_what_is_made_of_its_numbers(builder: Builder, form: str) -> None:
    value = random(1 + QUERIES, 2, 3)
    dual, inputs = dual_in(form, builder, value)
    negative = dual.each((2, 3), lambda part, _: builder.call(aten.neg.default, part))
    forms = {
        "itself": dual,
        "reshaped": dual.reshaped((3, 2)),
        "aligned": dual.aligned(3),
        "each": negative,
        "behind": dual.behind(negative.primal, 3),
        "behind, as they are": dual.behind(negative.primal),
        "interleaved": Interleaved.of(dual),
    }
    nodes = {name: (made.primal, made.tangents) for name, made in forms.items()}
    numbers = {name: torch.cat(parts) for name, parts in run(builder, nodes, *inputs).items()}
    expected = {
        "itself": value,
        "reshaped": value.reshape(-1, 3, 2),
        "aligned": value.reshape(-1, 1, 2, 3),
        "each": -value,
        "behind": torch.cat([-value[:1], 3 * value[1:]]),
        "behind, as they are": torch.cat([-value[:1], value[1:]]),
        "interleaved": value,
    }
    torch.testing.assert_close(numbers, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_value_meets_interleaved_tangents_as_they_lie(builder: Builder, form: str) -> None:
    value = random(1 + QUERIES, 2, 3)
    dual, inputs = dual_in(form, builder, value)
    found = Interleaved.of(dual)
    beside, meeting, shape = found.beside(found.primal)
    assert Interleaved.of(found) is found
    inside, product = run(builder, (found.inside, builder.product(beside, meeting)), *inputs)
    assert shape == product.shape == (2, QUERIES, 3)
    torch.testing.assert_close(inside, value[1:].movedim(0, -2))
    torch.testing.assert_close(product, value[0].unsqueeze(1) * inside)


def test_interleaved_tangents_follow_a_reshape_that_leaves_the_last_dimension(builder: Builder) -> None:
    value = random(1 + QUERIES, 2, 3, 4)
    dual, inputs = dual_in("interleaved", builder, value)
    kept, turned = dual.reshaped((6, 4)), dual.reshaped((2, 12))
    assert isinstance(kept, Interleaved) and not isinstance(turned, Interleaved)
    tangents = run(builder, (kept.tangents, turned.tangents), *inputs)
    assert torch.equal(tangents[0], value[1:].reshape(-1, 6, 4))
    assert torch.equal(tangents[1], value[1:].reshape(-1, 2, 12))


def test_tangents_are_made_once(builder: Builder) -> None:
    dual, _ = dual_in("with a factor", builder, random(1 + QUERIES, 2, 3))
    assert dual.tangents is dual.tangents
    assert dual.behind(dual.primal).unscaled is dual.unscaled
