"""The experts of a layer as one operator of a graph, which is cut there: every expert is a block of its own.

    experts(states [..., in], shares [..., chosen], index f32 [..., chosen], number, out) -> [..., out]

A token's answer is the sum of what its chosen experts make of it, each times its share. The operator is
traced and never run: `prge.numerics.expert_routing` brings tokens to experts and adds up what they answer.

    block   state -> [what experts see, shares, index, rest]     next block   [what they say, rest] -> ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from prge.errors import Refusal
from server_export.ir.walks import descendants
from server_export.trace.layers import Stretch, Values


@torch.library.custom_op("prge::experts", mutates_args=())
def experts(
    states: torch.Tensor, shares: torch.Tensor, index: torch.Tensor, number: int, out: int
) -> torch.Tensor:
    """The experts of the layer of that number."""
    raise NotImplementedError("experts are traced and become blocks, they are never run")


@experts.register_fake
def _(states: torch.Tensor, shares: torch.Tensor, index: torch.Tensor, number: int, out: int) -> torch.Tensor:
    return states.new_empty((*states.shape[:-1], out))


EXPERTS = torch.ops.prge.experts.default


def parted_at_experts(
    nodes: Sequence[Node], flow: set[Node], stretches: Sequence[Stretch]
) -> Iterator[Stretch]:
    """Stretches that end before experts or begin behind them, where a layer's rest joins the next one.

    Args:
        nodes: of the graph.
        flow: those that depend on its first placeholder.
        stretches: whose ends no experts lie across.

    Raises:
        Refusal: a layer with experts has shared values.
    """
    experts = [node for node in nodes if node.target is EXPERTS]
    if not experts:
        yield from stretches
        return
    if any(stretch.shared_in or stretch.shared_out for stretch in stretches):
        raise Refusal(
            "experts-with-shared-values",
            "the model's layers share values, and have experts",
            operator=str(EXPERTS),
            remedy="take a checkpoint of another type",
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
