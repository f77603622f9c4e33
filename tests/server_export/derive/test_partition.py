"""A joint graph is partitioned at the minimum cut: small modules whose residuals are known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from server_export.derive.backward.joint import GRAD_OUTPUT, backpropagate
from server_export.derive.backward.partition import PartitionedGraphs, partition
from server_export.derive.backward.rules import ONES
from server_export.ir.rewriting import rewritten_graph
from tests.server_export.derive.jvp.graphs import inputs_of, random

torch.set_num_threads(1)

aten = torch.ops.aten

# No width is a multiple of the tokens.
ROWS, TOKENS, WIDTH, INNER, RANK = 2, 7, 32, 48, 4


class Gated(nn.Module):
    """A norm, a gated MLP with an adapter on its last matrix, a residual; `shift` shifts the gate."""

    def __init__(self) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(
            {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER), "a": (RANK, INNER)}.items()
        ):
            self.register_buffer(name, random(*shape, seed=number, dtype=torch.float32) / 4)

    def forward(self, state: torch.Tensor, shift: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
        normed = state * torch.rsqrt((state * state).mean(-1, keepdim=True) + 1e-6)
        gate, up = F.linear(normed, self.gate), F.linear(normed, self.up)
        inner = F.silu(gate + shift) * up
        reduced = F.linear(inner, self.a).reshape(1, ROWS * TOKENS, RANK)
        return state + F.linear(inner, self.down) + torch.bmm(reduced, lora_b).reshape(state.shape)


def parts(changing: tuple[str, ...] = ()) -> tuple[PartitionedGraphs, dict[str, torch.Tensor]]:
    """Return the parts of the module's joint graph, and inputs by name."""
    module = Gated()
    state, lora_b, grad_output = (
        random(*shape, seed=9, dtype=torch.float32)
        for shape in ((ROWS, TOKENS, WIDTH), (1, RANK, WIDTH), (ROWS, TOKENS, WIDTH))
    )
    shift = torch.zeros(ROWS, TOKENS, 1)
    forward = rewritten_graph(module, (state, shift, lora_b))
    joint = backpropagate(forward, ["state", "lora_b"], ["lora_b"], TOKENS, with_outputs=True)
    arguments = {
        "state": state,
        "shift": shift,
        "lora_b": lora_b,
        GRAD_OUTPUT: grad_output,
        ONES: torch.ones(1, TOKENS, 1),
    }
    return partition(joint, ROWS, TOKENS, changing), arguments


def outputs_of(graph: torch.fx.GraphModule, arguments: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return tuple(graph(*(arguments[name] for name in inputs_of(graph))))


def by_autograd(arguments: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    state, lora_b = (arguments[name].clone().requires_grad_() for name in ("state", "lora_b"))
    output = Gated()(state, arguments["shift"], lora_b)
    return output.detach(), *torch.autograd.grad(output, (state, lora_b), arguments[GRAD_OUTPUT])


def test_the_parts_compute_what_autograd_does() -> None:
    graphs, arguments = parts()
    output, *saved = outputs_of(graphs.save, arguments)
    expected, *gradients = by_autograd(arguments)
    torch.testing.assert_close(output, expected)
    arguments |= {f"residual_{number}": value for number, value in enumerate(saved)}
    for graph in (graphs.backward, graphs.backward_saved):
        for actual, reference in zip(outputs_of(graph, arguments), gradients, strict=True):
            torch.testing.assert_close(actual, reference)


def test_cheap_or_unneeded_values_are_not_saved() -> None:
    """The backward pass needs gate, up and the adapter's product, but not down; norms are recomputed."""
    graphs, arguments = parts()
    _, *saved = outputs_of(graphs.save, arguments)
    assert sorted(value.shape for value in saved) == sorted(
        [(ROWS, TOKENS, INNER), (ROWS, TOKENS, INNER), (ROWS, TOKENS, RANK)]
    )
    assert graphs.backward_saved.graph.find_nodes(op="call_function", target=aten.rsqrt.default)
    assert inputs_of(graphs.save) == ["state", "shift", "lora_b"]
    assert inputs_of(graphs.backward_saved)[-4:] == [GRAD_OUTPUT, "residual_0", "residual_1", "residual_2"]


@pytest.mark.parametrize("changing", [(), ("shift",)])
def test_values_that_depend_on_a_changing_input_are_not_saved(changing: tuple[str, ...]) -> None:
    """The output of the gate is saved before the shift, not after it."""
    graphs, arguments = parts(changing)
    _, *saved = outputs_of(graphs.save, arguments)
    arguments["shift"] = arguments["shift"] + 1
    _, *other_saved = outputs_of(graphs.save, arguments)
    are_equal = [torch.equal(*pair) for pair in zip(saved, other_saved, strict=True)]
    assert (len(are_equal), sum(are_equal)) == ((2, 2) if changing else (3, 1))
    if changing:
        arguments |= {f"residual_{number}": value for number, value in enumerate(saved)}
        for actual, reference in zip(
            outputs_of(graphs.backward_saved, arguments), by_autograd(arguments)[1:], strict=True
        ):
            torch.testing.assert_close(actual, reference)
