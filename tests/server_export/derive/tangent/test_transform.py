"""The transformation: what it refuses, the inputs of its result, what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from server_export.derive.tangent.transform import ONES, Dense, RankOne, differentiate
from server_export.ir.rewriting import rewritten_graph
from tests.refusals import refusal
from tests.server_export.derive.tangent.graphs import (
    TOKENS,
    Function,
    inputs_of,
    jvp,
    random,
    relative_difference,
    with_tangents,
)

torch.set_num_threads(1)
aten = torch.ops.aten


class Inner(nn.Module):
    """A module whose operator isn't known."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.deep = nn.ModuleList([nn.Identity(), Function(function)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.deep[1](x) * 2


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (torch.erfinv, "aten.erfinv.default"),
        (torch.lgamma, "aten.lgamma.default"),
        (lambda x: F.linear(x, x), "aten.linear.default"),
    ],
    ids=["erfinv", "lgamma", "weight that is active"],
)
def test_operator_without_a_rule_is_named_with_its_module(function: Any, operator: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Inner(function))
    with refusal("operator-without-derivative") as caught:
        with_tangents(model, (random(3, 4, dtype=torch.float32),))
    assert (caught.value.operator, caught.value.module) == (operator, "1.deep.1")
    assert "--roles" in caught.value.remedy


def test_operator_without_a_rule_is_no_matter_where_nothing_depends_on_the_adapter() -> None:
    module = Function(lambda x, c: x * torch.lgamma(c))
    graph = with_tangents(module, (random(3),), (random(3, seed=1),))
    tangents = random(3, 3, seed=2)
    _, expected = jvp(module, (random(3),), (random(3, seed=1),), (tangents,))
    assert relative_difference(graph(random(3), random(3, seed=1), tangents)[1], expected) < 1e-12


def test_answer_that_depends_on_no_adapter_is_refused() -> None:
    with refusal("independent-of-adapter"):
        with_tangents(Function(lambda x, c: c * 2), (random(3),), (random(3),))


def test_tangents_are_inputs_after_all_others() -> None:
    graph_module = rewritten_graph(Function(lambda a, b, c: a * b * c), (random(3), random(3), random(3)))
    a, b, c = inputs_of(graph_module)
    graph = differentiate(graph_module, {c: Dense(), a: Dense()}, 2, {ONES: TOKENS})
    assert inputs_of(graph) == [a, b, c, f"d_{a}", f"d_{c}"]


@pytest.mark.parametrize("is_active", [False, True])
def test_direction_of_rank_one_is_the_product_of_its_factors(is_active: bool) -> None:
    rows, length, rank, out, queries = 2, 3, 4, 5, 3
    x, matrix = random(rows, length, rank), random(1, rank, out)
    u, v = random(queries, rows, rank, seed=1), random(queries, rows, out, seed=2)

    def through_adapter(x: torch.Tensor, *copies: torch.Tensor) -> torch.Tensor:
        # As the adapter's layer has it: copies of one matrix are rows of the stack.
        (lora_b,) = copies[-1:]
        states = torch.tanh(x * copies[0]) if is_active else x
        product = torch.bmm(states.reshape(lora_b.shape[0], -1, rank), lora_b)
        return torch.tanh(product.reshape(rows, length, out))

    module = Function(through_adapter)
    active = (random(1), matrix) if is_active else (matrix,)
    graph_module = rewritten_graph(module, (x, *active))
    names = inputs_of(graph_module)
    seeds: dict[str, Dense | RankOne] = {names[-1]: RankOne(rows)}
    seeds |= {names[1]: Dense()} if is_active else {}
    graph = differentiate(graph_module, seeds, queries, {ONES: TOKENS}).double()
    scale = (random(queries, 1),) if is_active else ()
    answer, found = graph(x, *active[:-1], matrix[0], *scale, u, v)

    directions = (*scale, torch.einsum("qri,qrj->qrij", u, v))
    copies = (*active[:-1], matrix.repeat(rows, 1, 1))
    expected = jvp(Function(lambda *moved: through_adapter(x, *moved)), copies, (), directions)
    assert relative_difference(answer, expected[0]) < 1e-12
    assert relative_difference(found, expected[1]) < 1e-12


def test_weights_are_shared_with_the_original() -> None:
    graph_module = rewritten_graph(nn.Linear(4, 4).double(), (random(2, 4),))
    weight = graph_module.get_parameter("weight")
    graph = differentiate(graph_module, {inputs_of(graph_module)[0]: Dense()}, 2, {ONES: TOKENS})
    assert graph.get_parameter("weight").data_ptr() == weight.data_ptr()


def test_what_depends_on_no_input_with_tangents_is_computed_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    below = Function(lambda x, c: x + torch.tanh(module(c)))
    operators = [
        [str(node.target) for node in graph.graph.find_nodes(op="call_function", target=target)]
        for graph in (with_tangents(below, (random(2, 4),), (random(2, 4, seed=1),)),)
        for target in (aten.linear.default, aten.tanh.default)
    ]
    assert [len(found) for found in operators] == [2, 1]


@pytest.mark.parametrize("tokens", [3, TOKENS])
def test_ones_are_an_input_before_the_adapter_if_tokens_are_added_up(tokens: int) -> None:
    def attend(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(x, -1)
        return torch.bmm(weights.reshape(1, 6, 3), matrix)

    x, matrix = random(2, 3, 3), random(1, 3, 4)
    graph_module = rewritten_graph(Function(attend), (x, matrix))
    first, last = inputs_of(graph_module)
    graph = differentiate(graph_module, {first: Dense(), last: RankOne(2)}, 2, {ONES: tokens})
    takes_ones = tokens == 3
    factors = [f"u_{last}", f"v_{last}"]
    assert inputs_of(graph) == [first, *[ONES] * takes_ones, last, f"d_{first}", *factors]
    shapes = {str(node.target): node.meta["val"].shape for node in graph.graph.find_nodes(op="placeholder")}
    assert shapes.get(ONES, (1, 3, 1)) == (1, 3, 1)
    assert (shapes[last], shapes[f"d_{first}"]) == ((3, 4), (2, 2, 3, 3))
    assert [shapes[name] for name in factors] == [(2, 2, 3), (2, 2, 4)]
