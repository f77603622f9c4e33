"""Write the operators of autograd's backward passes in operators that XNNPACK delegates."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule

from server_export.ir.operators import row_of, rules
from server_export.ir.writer import apply_rules

# Name of the input f32 [1, length, 1] of ones, which sums dimensions whose size no constant may have.
ONES = "ones"


def write_backward(graph_module: GraphModule) -> None:
    """Apply the backward rules to a graph, in place; its nodes have `meta["val"]`."""
    ones = graph_module.graph.find_nodes(op="placeholder", target=ONES)
    apply_rules(graph_module, rules("backward"), ones={node.meta["val"].shape[1]: node for node in ones})


def differentiable_form(target: Any) -> Any:
    """Return the function that autograd traces instead of an operator."""
    operator_row = row_of(target)
    return target if operator_row is None or operator_row.autograd is None else operator_row.autograd


def decompositions() -> dict[Any, Any]:
    """Return PyTorch's decompositions of autograd's operators that have no row in the table."""
    written = rules("backward")
    return {
        target: decomposition
        for target, decomposition in _backward_decompositions().items()
        if str(target) not in written
    }


@cache
def _backward_decompositions() -> dict[Any, Any]:
    table = torch.export.default_decompositions().items()
    return {target: decomposition for target, decomposition in table if "_backward" in str(target)}
