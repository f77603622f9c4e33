"""Chains of transpositions and reshapes move numbers once, to the same places."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

import torch
from torch.fx import Graph, GraphModule

from server_export.graph.permuting import join_transpositions

aten = torch.ops.aten

Step = tuple[object, list[int]]


def make_graph(value: torch.Tensor, steps: Sequence[Step]) -> tuple[GraphModule, torch.Tensor]:
    """A graph of these operators one after the other, and what it answers."""
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["val"] = value
    for target, numbers in steps:
        node = graph.call_function(
            target, (node, *([numbers] if target is not aten.transpose.int else numbers))
        )
        value = target(value, *([numbers] if target is not aten.transpose.int else numbers))
        node.meta["val"] = value
    answer = graph.call_function(aten.neg.default, (node,))
    graph.output(answer)
    return GraphModule({}, graph), -value


def transpositions(module: GraphModule) -> int:
    return sum(node.target in (aten.permute.default, aten.transpose.int) for node in module.graph.nodes)


def random_steps(draw: random.Random, value: torch.Tensor) -> list[Step]:
    steps: list[Step] = []
    for _ in range(draw.randint(2, 6)):
        if draw.random() < 0.5:
            order = draw.sample(range(value.dim()), value.dim())
            steps.append((aten.permute.default, order))
            value = value.permute(order)
            continue
        shape, rest = [], value.numel()
        while rest > 1 and len(shape) < 4:
            shape.append(draw.choice([size for size in range(1, rest + 1) if rest % size == 0]))
            rest //= shape[-1]
        steps.append((aten.reshape.default, [*shape, rest]))
        value = value.reshape(*shape, rest)
    return steps


@pytest.mark.parametrize("seed", range(60))
def test_any_chain_answers_the_same_with_at_most_as_many(seed: int) -> None:
    draw = random.Random(seed)
    value = torch.arange(float(torch.tensor(shape := draw.choices([1, 2, 3, 4, 6], k=3)).prod())).reshape(
        shape
    )
    module, expected = make_graph(value, random_steps(draw, value))
    before = transpositions(module)
    join_transpositions(module.graph)
    module.recompile()
    assert torch.equal(module(value), expected)
    assert transpositions(module) <= before


def test_heads_before_tokens_before_positions_is_one_transposition() -> None:
    steps: list[Step] = [
        (aten.reshape.default, [2, 5, 3, 4]),
        (aten.transpose.int, [1, 2]),
        (aten.permute.default, [2, 0, 1, 3]),
        (aten.reshape.default, [5, 6, 4]),
    ]
    value = torch.randn(2, 5, 12)
    module, expected = make_graph(value, steps)
    join_transpositions(module.graph)
    module.recompile()
    assert torch.equal(module(value), expected)
    assert transpositions(module) == 1


def test_there_and_back_is_none() -> None:
    value = torch.randn(2, 3, 4)
    module, expected = make_graph(value, [(aten.transpose.int, [0, 1]), (aten.permute.default, [1, 0, 2])])
    join_transpositions(module.graph)
    module.recompile()
    assert torch.equal(module(value), expected)
    assert transpositions(module) == 0


def test_a_value_that_something_else_reads_stays() -> None:
    graph = Graph()
    value = torch.randn(2, 3, 4)
    source = graph.placeholder("x")
    source.meta["val"] = value
    first = graph.call_function(aten.transpose.int, (source, 0, 1))
    first.meta["val"] = value.transpose(0, 1)
    second = graph.call_function(aten.transpose.int, (first, 1, 2))
    second.meta["val"] = value.transpose(0, 1).transpose(1, 2)
    graph.output(
        (graph.call_function(aten.neg.default, (first,)), graph.call_function(aten.neg.default, (second,)))
    )
    module = GraphModule({}, graph)
    join_transpositions(module.graph)
    module.recompile()
    answers = module(value)
    assert torch.equal(answers[0], -value.transpose(0, 1))
    assert torch.equal(answers[1], -value.permute(1, 2, 0))
