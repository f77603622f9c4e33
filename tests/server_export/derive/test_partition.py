"""A joint graph is parted where the fewest numbers cross: small modules whose saved values are known."""

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
    """A norm, a gated inner layer with an adapter on its last matrix, a residual; `shift` moves the gate."""

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
    """The parts of the module's joint graph, and inputs by name."""
    module = Gated()
    state, lora_b, slope = (
        random(*shape, seed=9, dtype=torch.float32)
        for shape in ((ROWS, TOKENS, WIDTH), (1, RANK, WIDTH), (ROWS, TOKENS, WIDTH))
    )
    shift = torch.zeros(ROWS, TOKENS, 1)
    forward = rewritten_graph(module, (state, shift, lora_b))
    joint = backpropagate(forward, ["state", "lora_b"], ["lora_b"], TOKENS, with_answer=True)
    given = {
        "state": state,
        "shift": shift,
        "lora_b": lora_b,
        GRAD_OUTPUT: slope,
        ONES: torch.ones(1, TOKENS, 1),
    }
    return partition(joint, ROWS, TOKENS, changing), given


def answers(graph: torch.fx.GraphModule, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return tuple(graph(*(given[name] for name in inputs_of(graph))))


def by_autograd(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    state, lora_b = (given[name].clone().requires_grad_() for name in ("state", "lora_b"))
    answer = Gated()(state, given["shift"], lora_b)
    return answer.detach(), *torch.autograd.grad(answer, (state, lora_b), given[GRAD_OUTPUT])


def test_its_parts_answer_what_autograd_does() -> None:
    found, given = parts()
    answer, *saved = answers(found.save, given)
    expected, *slopes = by_autograd(given)
    torch.testing.assert_close(answer, expected)
    given |= {f"saved_{number}": value for number, value in enumerate(saved)}
    for graph in (found.back, found.back_saved):
        for ours, theirs in zip(answers(graph, given), slopes, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_what_is_cheap_or_not_needed_is_not_saved() -> None:
    """The way back needs gate, up and the adapter's product, and not down; norms it computes again."""
    found, given = parts()
    _, *saved = answers(found.save, given)
    assert sorted(value.shape for value in saved) == sorted(
        [(ROWS, TOKENS, INNER), (ROWS, TOKENS, INNER), (ROWS, TOKENS, RANK)]
    )
    assert found.back_saved.graph.find_nodes(op="call_function", target=aten.rsqrt.default)
    assert inputs_of(found.save) == ["state", "shift", "lora_b"]
    assert inputs_of(found.back_saved)[-4:] == [GRAD_OUTPUT, "saved_0", "saved_1", "saved_2"]


@pytest.mark.parametrize("changing", [(), ("shift",)])
def test_what_depends_on_an_input_that_changes_is_not_saved(changing: tuple[str, ...]) -> None:
    """The gate is saved as the layer answers it, and not with its shift, which is nearer to the way back."""
    found, given = parts(changing)
    _, *saved = answers(found.save, given)
    given["shift"] = given["shift"] + 1
    _, *moved = answers(found.save, given)
    unmoved = [torch.equal(*pair) for pair in zip(saved, moved, strict=True)]
    assert (len(unmoved), sum(unmoved)) == ((2, 2) if changing else (3, 1))
    if changing:
        given |= {f"saved_{number}": value for number, value in enumerate(saved)}
        for ours, theirs in zip(answers(found.back_saved, given), by_autograd(given)[1:], strict=True):
            torch.testing.assert_close(ours, theirs)
