"""What a new graph remembers of its operators, so that nothing is written twice."""

from __future__ import annotations

import pytest
import torch

from server_export.derive.tangent.builder import Builder
from tests.server_export.derive.tangent.graphs import TOKENS, placeholders, random, run


def test_a_shape_that_a_value_has_is_not_written_again(builder: Builder) -> None:
    (x,) = placeholders(builder, "x")
    builder.know_shape(x, 2, 3)
    assert builder.reshape(x, 2, 3) is x
    flat = builder.reshape(x, 6)
    assert builder.reshape(x, 6) is flat
    assert builder.reshape(flat, 2, 3) is x
    assert builder.shape_as_it_lies(flat) == (2, 3)
    assert torch.equal(run(builder, flat, random(2, 3)), random(2, 3).reshape(6))


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


def test_a_sum_over_the_tokens_has_no_constant_of_their_number(builder: Builder) -> None:
    (x,) = placeholders(builder, "x")
    value = random(2, 3, TOKENS, dtype=torch.float32)
    total = run(builder, builder.total(x, 2, 3, TOKENS), value)
    assert not builder.graph.find_nodes(op="get_attr")
    torch.testing.assert_close(total, value.sum(-1, keepdim=True))


@pytest.mark.parametrize(("width", "layers"), [(1024, 1), (1031, 1), (2048, 2), (3 * 1024, 2), (2**21, 3)])
def test_long_sum_is_taken_in_parts(builder: Builder, width: int, layers: int) -> None:
    (x,) = placeholders(builder, "x")
    value = random(2, width, dtype=torch.float32)
    total = run(builder, builder.total(x, 2, width), value)
    torch.testing.assert_close(total, value.sum(1, keepdim=True), rtol=1e-5, atol=1e-3)
    weights = [node.args[1] for node in builder.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert len(weights) == layers
