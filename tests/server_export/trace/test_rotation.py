"""What turns the halves of a head becomes a linear layer."""

from __future__ import annotations

import pytest
import torch

from server_export.trace.rotation import turn_by_layers

torch.set_num_threads(1)


def test_halves_are_turned_by_a_layer() -> None:
    class Rotary(torch.nn.Module):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            turned = torch.cat([-x[..., 3:], x[..., :3]], -1)
            return x * cos + turned * sin

    inputs = torch.randn(2, 3, 5, 6), torch.randn(5, 6), torch.randn(5, 6)
    graph_module = torch.export.export(Rotary(), inputs, strict=False).module(check_guards=False)
    turn_by_layers(graph_module)
    linear, cat = (
        graph_module.graph.find_nodes(op="call_function", target=target)
        for target in (torch.ops.aten.linear.default, torch.ops.aten.cat.default)
    )
    assert len(linear) == 1 and not cat
    assert torch.equal(graph_module(*inputs), Rotary()(*inputs))


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
