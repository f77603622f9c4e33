"""The transformation of whole graphs: what it refuses, what it prunes, how often it computes a layer."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from prge.errors import BundleError
from server_export.derive.tangent.transform import Dense, RankOne, differentiate
from server_export.lower.lowering import rewritten_graph
from server_export.lower.method_graphs import export_programs
from server_export.model.program import BuiltProgram, example_inputs
from tests.server_export.derive.tangent.graphs import (
    Function,
    inputs_of,
    jvp,
    program_with_tangents,
    random,
    relative_difference,
    shapes_of,
    with_tangents,
)
from tests.server_export.programs import build
from tests.tiny_models import SHALLOW

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
        (torch.erf, r"aten\.erf\.default"),
        (lambda x: x.cumsum(-1), r"aten\.cumsum\.default"),
        (lambda x: torch.where(x > 0, x, -x), r"aten\.gt\.Scalar"),
        (lambda x: F.linear(x, x), r"aten\.linear\.default"),
    ],
    ids=["erf", "cumsum", "comparison", "weight that is active"],
)
def test_operator_without_a_rule_is_named_with_its_module(function: Any, operator: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Inner(function))
    with pytest.raises(BundleError, match=rf"{operator} in 1\.deep\.1 has no forward-mode") as caught:
        with_tangents(model, (random(3, 4, dtype=torch.float32),))
    assert "--estimator antithetic" in caught.value.remedy


def test_operator_without_a_rule_is_no_matter_where_nothing_depends_on_the_adapter() -> None:
    module = Function(lambda x, c: x * torch.erf(c))
    graph = with_tangents(module, (random(3),), (random(3, seed=1),))
    tangents = random(3, 3, seed=2)
    _, expected = jvp(module, (random(3),), (random(3, seed=1),), (tangents,))
    assert relative_difference(graph(random(3), random(3, seed=1), tangents)[1], expected) < 1e-12


def test_layer_of_a_model_is_named() -> None:
    built = build("llama", SHALLOW["llama"], estimator="tangent")
    built.module.model.model.layers[0].mlp.act_fn = Function(torch.erf)
    with pytest.raises(BundleError, match=r"aten\.erf\.default in model\.model\.layers\.0\.mlp\.act_fn has"):
        export_programs(built)


def test_answer_that_depends_on_no_adapter_is_refused() -> None:
    with pytest.raises(BundleError, match="doesn't depend on the adapter"):
        with_tangents(Function(lambda x, c: c * 2), (random(3),), (random(3),))


def test_tangents_are_inputs_after_all_others() -> None:
    graph_module = rewritten_graph(Function(lambda a, b, c: a * b * c), (random(3), random(3), random(3)))
    a, b, c = inputs_of(graph_module)
    graph = differentiate(graph_module, {c: Dense(), a: Dense()}, 2)
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
    graph = differentiate(graph_module, seeds, queries).double()
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
    graph = differentiate(graph_module, {inputs_of(graph_module)[0]: Dense()}, 2)
    assert graph.get_parameter("weight").data_ptr() == weight.data_ptr()


def layer_calls(graph: GraphModule) -> dict[str, list[Node]]:
    """Every call of a linear layer by the layer's name."""
    calls: dict[str, list[Node]] = {}
    for node in graph.graph.nodes:
        if node.target is aten.linear.default and str(node.args[1].target).endswith("weight"):
            calls.setdefault(str(node.args[1].target), []).append(node)
    return calls


def operators(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def upper_adapters(queries: int) -> tuple[BuiltProgram, GraphModule, dict[Node, tuple[int, ...]]]:
    built = build("llama", estimator="tangent", queries=queries, target_modules=r".*\.1\..*\.(q|v)_proj")
    graph = program_with_tangents(built)
    return built, graph, shapes_of(graph, example_inputs(built.contract))


def test_nothing_below_the_first_adapter_has_tangents() -> None:
    (_, two, of_two), (_, five, of_five) = upper_adapters(2), upper_adapters(5)
    (first_above,) = layer_calls(two)["model.model.layers.1.self_attn.q_proj.base.weight"]
    pairs = list(zip(operators(two), operators(five), strict=True))
    below = pairs[: [node for node, _ in pairs].index(first_above)]
    # The adapter's own inputs are shaped at the start.
    below = [
        pair for pair in below if not any(source.op == "placeholder" for source in pair[0].all_input_nodes)
    ]
    assert all(of_two[node] == of_five[other] for node, other in below)
    assert sum("layers.0" in name for name in layer_calls(two)) == 7
    assert all(nodes[0] in dict(below) for name, nodes in layer_calls(two).items() if "layers.0" in name)


@pytest.mark.parametrize("queries", [1, 5])
def test_every_layer_is_called_once_with_all_the_rows_it_needs(queries: int) -> None:
    built, graph, shapes = upper_adapters(queries)
    rows, length, positions = built.contract.rows, built.contract.sequence_length, built.contract.positions
    calls = layer_calls(graph)
    assert len(calls) == 2 * 7 + 1
    for name, nodes in calls.items():
        (node,) = nodes
        # The first adapted layers themselves still see states that no adapter has touched.
        is_below = "layers.0" in name or any(f".{part}_proj" in name for part in "qkv")
        slots = 1 if is_below else 1 + queries
        tokens = positions if "lm_head" in name else length
        assert math.prod(shapes[node][:-1]) == slots * rows * tokens, name
