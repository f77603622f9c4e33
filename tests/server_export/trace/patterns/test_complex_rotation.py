"""Products of complex numbers are written as rotations of pairs."""

from __future__ import annotations

import torch

from server_export.trace.patterns.complex_rotation import write_complex
from tests.server_export.trace.graphs import model_graph

torch.set_num_threads(1)


def test_a_product_of_complex_numbers_rotates_neighbours() -> None:
    def rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        rotations = torch.view_as_complex(table.unflatten(-1, (-1, 2))).unsqueeze(1)
        return torch.view_as_real(numbers * rotations).flatten(3)

    inputs = torch.randn(2, 3, 5, 6), torch.randn(1, 5, 6)
    graph = model_graph(rotated, *inputs)
    write_complex(graph)
    graph_module = graph.graph_module
    assert not any("complex" in str(node.target) for node in graph_module.graph.nodes)
    graph_module.recompile()
    assert torch.allclose(graph_module(*inputs), rotated(*inputs), atol=1e-6)
