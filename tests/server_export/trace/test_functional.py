"""A traced graph becomes functional, in operators that later passes know."""

from __future__ import annotations

import torch
from torch import nn

from server_export.trace.functional import functional_graph

torch.set_num_threads(1)


class Transposed(nn.Linear):
    """A layer that multiplies by its transposed weight."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.weight.T + self.bias


def test_fills_depend_on_the_shape_only() -> None:
    class Filled(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states + torch.zeros_like(states) + states.new_ones(2, 5, 1) + torch.full_like(states, 3.0)

    states = torch.randn(2, 5, 4)
    graph_module = functional_graph(torch.export.export(Filled(), (states,), strict=False))
    fills = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)
    assert len(fills) == 3 and not any(node.all_input_nodes for node in fills)


def test_a_product_with_a_transposed_weight_is_a_linear_layer() -> None:
    layer, states = Transposed(4, 3).requires_grad_(False), torch.randn(2, 5, 4)
    graph_module = functional_graph(torch.export.export(layer, (states,), strict=False))
    assert len(graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)) == 1
    torch.testing.assert_close(graph_module(states), layer(states))
