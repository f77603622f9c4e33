"""What turns the halves of a head becomes a linear layer."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from server_export.trace.rotation import turn_by_layers, write_complex

torch.set_num_threads(1)


def test_halves_are_turned_by_a_layer() -> None:
    class Rotary(torch.nn.Module):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            turned = torch.cat([-x[..., 3:], x[..., :3]], -1)
            return x * cos + turned * sin

    inputs = torch.randn(2, 3, 5, 6), torch.randn(5, 6), torch.randn(5, 6)
    graph_module = torch.export.export(Rotary(), inputs, strict=False).module(check_guards=False)
    turn_by_layers(graph_module)
    names = Counter(
        str(node.target).split(".")[1] for node in graph_module.graph.nodes if "aten" in str(node.target)
    )
    assert names == {"mul": 2, "linear": 1, "add": 1}
    assert torch.equal(graph_module(*inputs), Rotary()(*inputs))


def test_a_product_of_complex_numbers_turns_neighbours() -> None:
    class Rotary(torch.nn.Module):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            turns = torch.view_as_complex(table.unflatten(-1, (-1, 2))).unsqueeze(1)
            return torch.view_as_real(numbers * turns).flatten(3)

    inputs = torch.randn(2, 3, 5, 6), torch.randn(1, 5, 6)
    graph_module = torch.export.export(Rotary(), inputs, strict=False).module(check_guards=False)
    write_complex(graph_module)
    assert not any("complex" in str(node.target) for node in graph_module.graph.nodes)
    graph_module.recompile()
    assert torch.allclose(graph_module(*inputs), Rotary()(*inputs), atol=1e-6)


@pytest.mark.parametrize("parts", [(0, 3, 3, 6), (3, 6, 3, 6), (2, 6, 0, 2)])
def test_what_turns_no_halves_stays(parts: tuple[int, int, int, int]) -> None:
    class Other(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c, d = parts
            return torch.cat([-x[..., a:b], x[..., c:d]], -1)

    x = torch.randn(2, 3, 5, 6)
    graph_module = torch.export.export(Other(), (x,), strict=False).module(check_guards=False)
    turn_by_layers(graph_module)
    assert not graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
