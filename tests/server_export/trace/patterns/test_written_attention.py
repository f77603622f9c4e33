"""Attention with separate rows and heads is rewritten to the form with one merged dimension."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from server_export.ir.decomposition import decompose
from server_export.ir.rewriting import rewrite
from server_export.ir.shapes import fill_in_values
from server_export.trace.patterns.written_attention import join_heads
from tests.server_export.derive.jvp.graphs import Function

torch.set_num_threads(1)
aten = torch.ops.aten

ROWS, HEADS, LENGTH, WIDTH = 2, 3, 5, 4
Attention = Callable[..., torch.Tensor]
FORMS: dict[str, Attention] = {
    "scaled, then masked": lambda q, k, v, m: torch.softmax(q @ k.transpose(-1, -2) / 2 + m, -1) @ v,
    "masked, then scaled": lambda q, k, v, m: torch.softmax((q @ k.mT + m) * 0.5, -1) @ v,
    "mask first": lambda q, k, v, m: torch.softmax(m + q @ k.mT, -1) @ v,
    "merged before the softmax": lambda q, k, v, m: (
        torch.softmax((q @ k.mT + m).reshape(-1, LENGTH, LENGTH), -1) @ v.reshape(-1, LENGTH, WIDTH)
    ),
    "separate after scaling": lambda q, k, v, m: (
        torch.softmax(
            (torch.bmm(q.flatten(0, 1), k.mT.flatten(0, 1)) / 2).view(ROWS, HEADS, LENGTH, LENGTH) + m, -1
        )
        @ v
    ),
    "expanded keys": lambda q, k, v, m: torch.softmax(q @ k[:, :1].mT.expand(-1, HEADS, -1, -1) + m, -1) @ v,
    "soft cap": lambda q, k, v, m: torch.softmax(torch.tanh(q @ k.mT / 3) * 3 + m, -1) @ v,
}


def graph_of(attention: Attention, mask: torch.Tensor, name: str) -> GraphModule:
    inputs = (*(random_tensor(seed) for seed in range(3)), mask)
    graph_module = torch.export.export(Function(attention), inputs, strict=False).module(check_guards=False)
    decompose(graph_module)
    rewrite(graph_module)
    fill_in_values(graph_module)
    graph_module.graph.find_nodes(op="placeholder")[-1].target = name
    join_heads(graph_module)
    return graph_module


def random_tensor(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


CAUSAL_MASK = torch.full((1, LENGTH, LENGTH), -3e4).triu(1)
MASKS = {
    "table_0": CAUSAL_MASK,
    "padding_mask": torch.tensor([[0.0, 0, 0, -3e4, -3e4], [0, 0, 0, 0, 0]]).reshape(ROWS, 1, 1, LENGTH),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_no_reshape_remains_between_the_products(form: str, mask: str) -> None:
    graph_module = graph_of(FORMS[form], MASKS[mask], mask)
    first, second = graph_module.graph.find_nodes(op="call_function", target=aten.bmm.default)
    node = second.args[0]
    while node is not first:
        assert node.target not in (aten.reshape.default, aten.view.default, aten.expand.default)
        node = next(each for each in node.all_input_nodes if each.meta["val"].shape == node.meta["val"].shape)
    assert first.args[1].target is aten.transpose.int
    inputs = (*(random_tensor(seed) for seed in range(3)), MASKS[mask])
    torch.testing.assert_close(graph_module(*inputs), FORMS[form](*inputs))


def test_values_with_equal_scores_share_one_product() -> None:
    """Differential attention computes the same scores for two halves of its values."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        first, second = (torch.softmax(q @ k.mT + m, -1) @ values for values in (v, torch.tanh(v[..., :2])))
        return torch.cat([first, second], -1)

    graph_module = graph_of(attention, CAUSAL_MASK, "table_0")
    assert len(graph_module.graph.find_nodes(op="call_function", target=aten.softmax.int)) == 1
    assert len(graph_module.graph.find_nodes(op="call_function", target=aten.bmm.default)) == 2
    inputs = (*(random_tensor(seed) for seed in range(3)), CAUSAL_MASK)
    torch.testing.assert_close(graph_module(*inputs), attention(*inputs))
