"""The experts of a layer as one operator of a graph, which is cut there: every expert is a block of its own.

    experts(states [..., in], shares [..., chosen], index f32 [..., chosen], number, out) -> [..., out]

A token's answer is the sum of what its chosen experts make of it, each times its share. The operator is
traced and never run: `prge.learning.experts` brings tokens to experts and adds up what they answer. Where a
model has all experts see all tokens, times shares that are 0 for most, those are found that aren't.

    block   state -> [what experts see, shares, index, rest]     next block   [what they say, rest] -> ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from prge.errors import BundleError
from server_export.ir.walks import descendants
from server_export.ir.writer import Writer
from server_export.trace.layers import Stretch, Values

aten = torch.ops.aten
# What computes each number of a share for itself.
_OF_A_SHARE = {aten.sigmoid.default, aten.to.dtype, aten._to_copy.default}


@torch.library.custom_op("prge::experts", mutates_args=())
def experts(
    states: torch.Tensor, shares: torch.Tensor, index: torch.Tensor, number: int, out: int
) -> torch.Tensor:
    """The experts of the layer of that number."""
    raise NotImplementedError("experts are traced and become blocks, they are never run")


@experts.register_fake
def _(states: torch.Tensor, shares: torch.Tensor, index: torch.Tensor, number: int, out: int) -> torch.Tensor:
    return states.new_empty((*states.shape[:-1], out))


@torch.library.custom_op("prge::all_experts", mutates_args=())
def all_experts(states: torch.Tensor, number: int, out: int) -> torch.Tensor:
    """All experts of the layer of that number, of [experts x tokens, in]: each of as many in turn."""
    raise NotImplementedError("experts are traced and become blocks, they are never run")


@all_experts.register_fake
def _(states: torch.Tensor, number: int, out: int) -> torch.Tensor:
    return states.new_empty((states.shape[0], out))


EXPERTS = torch.ops.prge.experts.default
ALL_EXPERTS = torch.ops.prge.all_experts.default


def choose_experts(graph_module: GraphModule) -> None:
    """Let tokens see those experts alone whose shares aren't 0, in place, where they see all.

    Raises:
        BundleError: what shares are 0 isn't known.
    """
    writer = Writer(graph_module)
    for node in graph_module.graph.find_nodes(op="call_function", target=ALL_EXPERTS):
        product, number, out = node.args
        sums, *others = (user for each in node.users for user in each.users)
        parts = _seen_and_scores(product)
        chosen = _chosen(parts[1]) if parts else None
        is_sum = sums.target is aten.sum.dim_IntList and sums.args[1:] == ([0],) and not others
        if parts is None or chosen is None or not is_sum:
            raise BundleError(
                "all experts of a layer see all tokens, times shares that are computed in a way that isn't "
                "known here",
                remedy="take a checkpoint of another type, such as qwen3_moe, olmoe, granitemoe or mixtral",
            )
        source, (steps, shares, index) = parts[0], chosen

        def write(writer: Writer, *given: Any) -> Node:
            source, steps, shares, index, number, out = given
            for step in steps:
                shares = writer.call(step.target, shares, *step.args[1:])
            index = writer.call(aten.to.dtype, index, torch.float32)
            return writer.call(EXPERTS, source, shares, index, number, out)

        writer.replace(sums, write, source, steps, shares, index, number, out)
    graph_module.graph.eliminate_dead_code()


def _seen_and_scores(product: Any) -> tuple[Node, Node] | None:
    """Of states [tokens, in] that are repeated for each expert, times scores [tokens, experts], these two."""
    if product.target is not aten.mul.Tensor:
        return None
    repeated, column = product.args
    if repeated.target is not aten.repeat.default or repeated.args[1][1:] != [1]:
        return None
    turned = column.args[0]
    return (repeated.args[0], turned.args[0]) if turned.target is aten.transpose.int else None


def _chosen(scores: Any) -> tuple[list[Node], Node, Node] | None:
    """How shares are made of numbers, the numbers, and whose they are, if all other shares are 0."""
    steps: list[Node] = []
    while scores.target in _OF_A_SHARE:
        steps.insert(0, scores)
        scores = scores.args[0]
    if scores.target is not aten.scatter.src:
        return None
    others, _, index, numbers = scores.args
    if others.target is not aten.full.default:
        return None
    other: Any = torch.tensor(float(others.args[1]))
    for step in steps:
        target: Any = step.target
        other = target(other, *step.args[1:])
    return (steps, numbers, index) if float(other) == 0 else None


def parted_at_experts(
    nodes: Sequence[Node], flow: set[Node], stretches: Sequence[Stretch]
) -> Iterator[Stretch]:
    """Stretches that end before experts or begin behind them, where a layer's rest joins the next one.

    Args:
        nodes: of the graph.
        flow: those that depend on its first placeholder.
        stretches: whose ends no experts lie across.

    Raises:
        BundleError: a layer with experts has shared values.
    """
    experts = [node for node in nodes if node.target is EXPERTS]
    if not experts:
        yield from stretches
        return
    if any(stretch.takes or stretch.gives for stretch in stretches):
        raise BundleError(
            "the model's layers share values, and have experts", remedy="take a checkpoint of another type"
        )
    place = {node: index for index, node in enumerate(nodes)}
    starts, end = stretches[0].starts, -1
    for stretch in stretches:
        begin, end = end, max(place[node] for node in stretch.ends)
        while experts and place[experts[0]] <= end:
            states, shares, index, number, _ = experts[0].args
            rest = _beside(nodes, flow, experts)
            yield Stretch(starts, (states, shares, index, *rest), experts=number)
            starts = (experts.pop(0), *rest)
        # What a layer's experts say joins the next layer.
        if starts[0].target is not EXPERTS or place[starts[0]] <= begin or stretch is stretches[-1]:
            yield Stretch(starts, stretch.ends)
            starts = stretch.ends


def _beside(nodes: Sequence[Node], flow: set[Node], experts: Sequence[Node]) -> Values:
    """What passes by the first of some experts: needed behind them, and computed without any of them."""
    behind = descendants(experts)
    before = flow - behind
    return tuple(node for node in nodes if node in before and behind.intersection(node.users) - {experts[0]})
