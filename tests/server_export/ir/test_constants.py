"""Equal constants of a module are stored once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from server_export.ir.constants import GraphConstants


@pytest.fixture
def module() -> GraphModule:
    return GraphModule(nn.Module(), Graph())


@pytest.mark.parametrize(
    ("first", "second", "are_equal"),
    [
        (torch.ones(4), torch.ones(4), True),
        (torch.ones(4), torch.ones(2, 2), False),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32), False),
        (torch.zeros(2), -torch.zeros(2), False),
        (torch.eye(3), torch.eye(3).t(), True),
    ],
    ids=["equal", "shape", "type with the same bytes", "sign of zero", "strides"],
)
def test_constants_are_compared_by_dtype_shape_and_bits(
    module: GraphModule, first: torch.Tensor, second: torch.Tensor, are_equal: bool
) -> None:
    constants = GraphConstants(module)
    one, other = constants.name(first), constants.name(second)
    assert (one == other) is are_equal
    for name, tensor in ((one, first), (other, second)):
        assert torch.equal(module.get_buffer(name), tensor)


def test_existing_names_of_the_module_are_kept(module: GraphModule) -> None:
    module.register_buffer("constant_0", torch.zeros(1))
    name = GraphConstants(module).name(torch.ones(1))
    assert module.get_buffer("constant_0").item() == 0
    assert module.get_buffer(name).item() == 1
