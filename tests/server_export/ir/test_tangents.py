"""Values with tangents: nodes that are shared, and factors that are applied late."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from server_export.ir.tangents import Dual, GraphTangents, Interleaved
from tests.server_export.derive.jvp.graphs import (
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


def test_a_reshape_is_not_written_twice(tangents: GraphTangents) -> None:
    (x,) = placeholders(tangents, x=random(2, 3))
    assert tangents.reshape(x, [2, 3]) is x
    flat = tangents.reshape(x, [6])
    assert tangents.reshape(x, [6]) is flat
    assert tangents.reshape(flat, [2, 3]) is x
    assert torch.equal(run(tangents, flat, random(2, 3)), random(2, 3).reshape(6))


def test_products_with_numbers_and_none(tangents: GraphTangents) -> None:
    (x,) = placeholders(tangents, x=torch.ones(1))
    assert tangents.product(None, x) is x
    assert tangents.product(2, None) == 2
    assert tangents.product(2, 3) == 6
    assert run(tangents, tangents.product(2, x), torch.tensor([4.0])).tolist() == [8.0]


def test_equal_constants_are_read_once(tangents: GraphTangents) -> None:
    assert tangents.constant(torch.ones(1, 4)) is tangents.constant(torch.ones(1, 4))
    assert tangents.constant(torch.ones(1, 4)) is not tangents.constant(torch.ones(4, 1))
    assert tangents.constant(torch.zeros(1, 4)) is not tangents.constant(torch.ones(1, 4))


def test_a_sum_over_tokens_needs_no_constant_of_their_number(tangents: GraphTangents) -> None:
    value = random(2, 3, TOKENS, dtype=torch.float32)
    (x,) = placeholders(tangents, x=value)
    total = run(tangents, tangents.total(x), value)
    assert not tangents.graph.find_nodes(op="get_attr")
    torch.testing.assert_close(total, value.sum(-1, keepdim=True))


@pytest.mark.parametrize(("width", "layers"), [(1024, 1), (1031, 1), (2048, 2), (3 * 1024, 2), (2**21, 3)])
def test_a_long_sum_is_computed_in_chunks(tangents: GraphTangents, width: int, layers: int) -> None:
    value = random(2, width, dtype=torch.float32)
    (x,) = placeholders(tangents, x=value)
    total = run(tangents, tangents.total(x), value)
    torch.testing.assert_close(total, value.sum(1, keepdim=True), rtol=1e-5, atol=1e-3)
    weights = [node.args[1] for node in tangents.graph.nodes if node.target is aten.linear.default]
    assert len(weights) == layers


def wide_operators(module: nn.Module) -> int:
    """Return how many operators of a module's graph process all tangents of a [2, 4] input."""
    graph = with_tangents(module, (random(2, 4),), queries=QUERIES)
    shapes = shapes_of(graph, (random(2, 4), random(QUERIES, 2, 4)))
    return sum(node.op == "call_function" and shape[0] >= QUERIES for node, shape in shapes.items())


def test_bias_and_derivative_are_computed_for_the_primal_only() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).double()
    # One per layer, and the derivative is multiplied with the tangents once, right before the next layer.
    assert wide_operators(layers) == 3


def test_derivatives_are_multiplied_before_the_tangents() -> None:
    assert wide_operators(Function(lambda x: torch.tanh(torch.exp(x) * 3).sigmoid())) == 1


def test_constants_are_added_to_the_primal_only() -> None:
    assert wide_operators(Function(lambda x: (x + 1) - 2 + 3)) == 0


FORMS = ("plain", "with a factor", "interleaved", "interleaved and flat")


def dual_in(form: str, tangents: GraphTangents, value: torch.Tensor) -> tuple[Dual, tuple[torch.Tensor, ...]]:
    """Return a dual of `value` [1 + queries, *shape] in one form, and the inputs of its graph."""
    shape, primal, tangent_values = value.shape[1:], value[:1], value[1:]
    factor = torch.full_like(primal, 2)
    if form == "with a factor":
        tangent_values = tangent_values / 2
    elif form.startswith("interleaved"):
        tangent_values = tangent_values.movedim(0, -2)
    if form == "interleaved and flat":
        tangent_values = tangent_values.reshape(*shape[:-1], -1)
    inputs = primal, tangent_values, factor
    one, other, third = placeholders(tangents, one=primal, other=tangent_values, third=factor)
    if form.startswith("interleaved"):
        return Interleaved(tangents, one, other), inputs
    return Dual(tangents, one, other, third if form == "with a factor" else None), inputs


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_dual_behave_alike(tangents: GraphTangents, form: str) -> None:
    value = random(1 + QUERIES, 2, 3)
    dual, inputs = dual_in(form, tangents, value)
    negative = dual.map(lambda part, _: tangents.call(aten.neg.default, part))
    forms = {
        "itself": dual,
        "reshaped": dual.reshaped((3, 2)),
        "aligned": dual.aligned(3),
        "map": negative,
        "scaled": dual.scaled(negative.primal, 3),
        "scaled by nothing": dual.scaled(negative.primal),
        "interleaved": Interleaved.of(dual),
    }
    nodes = {name: (variant.primal, variant.tangents) for name, variant in forms.items()}
    numbers = {name: torch.cat(parts) for name, parts in run(tangents, nodes, *inputs).items()}
    expected = {
        "itself": value,
        "reshaped": value.reshape(-1, 3, 2),
        "aligned": value.reshape(-1, 1, 2, 3),
        "map": -value,
        "scaled": torch.cat([-value[:1], 3 * value[1:]]),
        "scaled by nothing": torch.cat([-value[:1], value[1:]]),
        "interleaved": value,
    }
    torch.testing.assert_close(numbers, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_primal_broadcasts_against_interleaved_tangents(tangents: GraphTangents, form: str) -> None:
    value = random(1 + QUERIES, 2, 3)
    dual, inputs = dual_in(form, tangents, value)
    interleaved = Interleaved.of(dual)
    one, broadcast_tangents = interleaved.broadcastable(interleaved.primal)
    assert Interleaved.of(interleaved) is interleaved
    inside, product = run(tangents, (interleaved.inside, tangents.product(one, broadcast_tangents)), *inputs)
    assert product.shape == (2, QUERIES, 3)
    torch.testing.assert_close(inside, value[1:].movedim(0, -2))
    torch.testing.assert_close(product, value[0].unsqueeze(1) * inside)


def test_interleaved_tangents_keep_their_layout_if_the_last_dimension_stays(
    tangents: GraphTangents,
) -> None:
    value = random(1 + QUERIES, 2, 3, 4)
    dual, inputs = dual_in("interleaved", tangents, value)
    kept, converted = dual.reshaped((6, 4)), dual.reshaped((2, 12))
    assert isinstance(kept, Interleaved) and not isinstance(converted, Interleaved)
    tangent_outputs = run(tangents, (kept.tangents, converted.tangents), *inputs)
    assert torch.equal(tangent_outputs[0], value[1:].reshape(-1, 6, 4))
    assert torch.equal(tangent_outputs[1], value[1:].reshape(-1, 2, 12))


def test_tangents_are_computed_once(tangents: GraphTangents) -> None:
    dual, _ = dual_in("with a factor", tangents, random(1 + QUERIES, 2, 3))
    assert dual.tangents is dual.tangents
    assert dual.scaled(dual.primal).unscaled is dual.unscaled
