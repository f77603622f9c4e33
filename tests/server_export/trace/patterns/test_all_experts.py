"""If all experts see all tokens, those with nonzero shares are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from server_export.trace.experts import EXPERTS
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns.all_experts import ALL_EXPERTS, choose_experts
from tests.refusals import refusal
from tests.server_export.trace.graphs import model_graph

COUNT, SELECTED, TOKENS, WIDTH = 6, 2, 5, 4


def graph_of_layer(others: float, act: Callable[[torch.Tensor], torch.Tensor]) -> ModelGraph:
    """Return the graph of a layer whose router replaces all but the largest scores by another number."""

    def layer(state: torch.Tensor) -> torch.Tensor:
        logits = torch.cat([state, state[:, :2]], -1)
        largest, index = torch.topk(logits, SELECTED)
        shares = act(torch.full_like(logits, others).scatter_(1, index, largest))
        expert_inputs = state.repeat(COUNT, 1) * shares.transpose(0, 1).reshape(-1, 1)
        return ALL_EXPERTS(expert_inputs, 3, WIDTH).reshape(COUNT, -1, WIDTH).sum(0)

    with torch.device("meta"):
        state = torch.empty(TOKENS, WIDTH)
        return model_graph(layer, state)


def test_selected_shares_equal_the_shares_of_all_experts() -> None:
    graph = graph_of_layer(float("-inf"), torch.sigmoid)
    choose_experts(graph)
    graph_module = graph.graph_module
    (node,) = graph_module.graph.find_nodes(op="call_function", target=EXPERTS)
    states, shares, index, number, out = node.args
    assert (states.op, number, out) == ("placeholder", 3, WIDTH)
    assert shares.target is torch.ops.aten.sigmoid.default
    assert tuple(shares.meta["val"].shape) == tuple(index.meta["val"].shape) == (TOKENS, SELECTED)
    assert index.meta["val"].dtype is torch.float32
    assert graph_module.graph.output_node().args[0] in (node, (node,))


@pytest.mark.parametrize(
    ("others", "act"), [(0.0, torch.sigmoid), (float("-inf"), lambda scores: torch.softmax(scores, -1))]
)
def test_shares_that_may_not_be_0_are_refused(
    others: float, act: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with refusal("shares-of-experts"):
        choose_experts(graph_of_layer(others, act))
