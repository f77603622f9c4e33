"""What a new graph remembers of its operators, so that nothing is written twice."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from server_export.derive.tangent.builder import Builder
from tests.server_export.derive.tangent.graphs import QUERIES, placeholders, random, run


def test_values_that_lie_alike_are_joined_as_they_lie(builder: Builder) -> None:
    first, second, other = placeholders(builder, "first", "second", "other")
    builder.know_shape(first, 2, 3)
    builder.know_shape(second, 2, 6)
    seen = [builder.reshape(first, 2, 1, 3), builder.reshape(second, 2, 1, 6)]
    joined = builder.joined(seen, [3, 6], (2, 1))
    assert joined.args == ([first, second], 1)
    apart = builder.joined([seen[0], other], [3, 6], (2, 1))
    assert apart.args[0][0] is seen[0]
    inputs = random(2, 3), random(2, 6, seed=1), random(2, 1, 6, seed=2)
    whole, both = run(builder, (joined, apart), *inputs)
    assert torch.equal(whole, torch.cat(inputs[:2], 1))
    assert torch.equal(both, torch.cat([inputs[0].reshape(2, 1, 3), inputs[2]], 2))


def test_products_with_numbers_and_with_nothing(builder: Builder) -> None:
    (x,) = placeholders(builder, "x")
    assert builder.product(None, x) is x
    assert builder.product(2, None) == 2
    assert builder.product(2, 3) == 6
    assert run(builder, builder.product(2, x), torch.tensor([4.0])).tolist() == [8.0]


def test_equal_constants_are_stored_once(builder: Builder) -> None:
    assert builder.ones(1, 4) is builder.ones(1, 4)
    assert builder.ones(1, 4) is not builder.ones(4, 1)
    assert builder.zeros(1, 4) is not builder.ones(1, 4)


def test_sums_and_what_leaves_tangents_alone(builder: Builder) -> None:
    (x,) = placeholders(builder, "x")
    value = random(2, 3, dtype=torch.float32)
    only = builder.tangents_only((2, 3), 3)
    results = (
        builder.total(x, 2, 3),
        builder.product(x, only),
        only,
    )
    total, tangents, mask = run(builder, results, value)
    assert mask.shape == (1 + QUERIES, 2, 1)
    torch.testing.assert_close(total, value.sum(1, keepdim=True))
    assert torch.equal(tangents[0], torch.zeros(2, 3))
    assert torch.equal(tangents[1:], (3 * value).repeat(QUERIES, 1, 1))


@pytest.mark.parametrize(("width", "layers"), [(1024, 1), (1031, 1), (2048, 2), (3 * 1024, 2), (2**21, 3)])
def test_long_sum_is_taken_in_parts(builder: Builder, width: int, layers: int) -> None:
    (x,) = placeholders(builder, "x")
    value = random(2, width, dtype=torch.float32)
    total = run(builder, builder.total(x, 2, width), value)
    torch.testing.assert_close(total, value.sum(1, keepdim=True), rtol=1e-5, atol=1e-3)
    weights = [node.args[1] for node in builder.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert len(weights) == layers


def test_numbers_of_a_product_meet_before_its_node(builder: Builder) -> None:
    (x,) = placeholders(builder, "x")
    product = builder.product(-0.5, builder.product(x, 2.0))
    assert builder.apart(product) == (x, -1.0)
    assert builder.apart(x) == (x, 1)
    assert builder.apart(None) == (None, 1)
    assert run(builder, product, torch.tensor([4.0])).tolist() == [-4.0]
