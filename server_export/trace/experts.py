"""The experts of a layer as one operator, where the graph is cut: every expert becomes a block.

    experts(states [..., in], shares [..., chosen], index f32 [..., chosen], number, out) -> [..., out]

The output of a token is the sum of the outputs of its selected experts, weighted by the shares. The operator
is traced and never run: `prge.numerics.expert_routing` distributes the tokens to experts and adds up their
outputs.

    block   hidden states -> [expert inputs, shares, index, rest]    next block   [outputs, rest] -> ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from prge.errors import Refusal
from server_export.ir.traversal import descendants
from server_export.trace.layers import Stretch, Values


@torch.library.custom_op("prge::experts", mutates_args=())
def experts(
    states: torch.Tensor, shares: torch.Tensor, index: torch.Tensor, number: int, out: int
) -> torch.Tensor:
    """Return the output of the experts of the layer with this number."""
    raise NotImplementedError("Experts are traced and become blocks; the operator is never run.")


@experts.register_fake
def _(states: torch.Tensor, shares: torch.Tensor, index: torch.Tensor, number: int, out: int) -> torch.Tensor:
    return states.new_empty((*states.shape[:-1], out))


EXPERTS = torch.ops.prge.experts.default


def split_at_experts(
    nodes: Sequence[Node], flow: set[Node], stretches: Sequence[Stretch]
) -> Iterator[Stretch]:
    """Yield stretches that end before experts and start after them; a layer's rest joins the next layer.

    Args:
        nodes: the nodes of the graph.
        flow: the nodes that depend on the first placeholder.
        stretches: the layers of the model; no experts lie across their ends.

    Raises:
        Refusal: the layers have both experts and shared values.
    """
    experts = [node for node in nodes if node.target is EXPERTS]
    if not experts:
        yield from stretches
        return
    if any(stretch.shared_in or stretch.shared_out for stretch in stretches):
        raise Refusal(
            "experts-with-shared-values",
            "The model has both experts and values that layers share.",
            operator=str(EXPERTS),
            remedy="Use a checkpoint of another model type.",
        )
    position_of = {node: index for index, node in enumerate(nodes)}
    starts, end = stretches[0].starts, -1
    for stretch in stretches:
        begin, end = end, max(position_of[node] for node in stretch.ends)
        while experts and position_of[experts[0]] <= end:
            states, shares, index, number, _ = experts[0].args
            rest = _bypassing(nodes, flow, experts)
            yield Stretch(starts, (states, shares, index, *rest), experts=number)
            starts = (experts.pop(0), *rest)
        # The outputs of a layer's experts are added in the first block of the next layer.
        if starts[0].target is not EXPERTS or position_of[starts[0]] <= begin or stretch is stretches[-1]:
            yield Stretch(starts, stretch.ends)
            starts = stretch.ends


def _bypassing(nodes: Sequence[Node], flow: set[Node], experts: Sequence[Node]) -> Values:
    """Return the values that bypass the first experts: used after them, and independent of all experts."""
    after = descendants(experts)
    independent = flow - after
    return tuple(
        node for node in nodes if node in independent and after.intersection(node.users) - {experts[0]}
    )
