"""What autograd writes for a backward pass, in operators that XNNPACK takes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule

from server_export.ir.operators import row_of, rules
from server_export.ir.writer import apply_rules

# An input f32 [1, length, 1] of ones, where a dimension that no constant may have is added up.
ONES = "ones"


def write_backward(graph_module: GraphModule) -> None:
    """Write what autograd has put into a graph plainer, in place; its nodes carry `meta["val"]`."""
    ones = graph_module.graph.find_nodes(op="placeholder", target=ONES)
    apply_rules(graph_module, rules("backward"), ones={node.meta["val"].shape[1]: node for node in ones})


def through(target: Any) -> Any:
    """What autograd goes through in the place of an operator."""
    known = row_of(target)
    return target if known is None or known.autograd is None else known.autograd


def decompositions() -> dict[Any, Any]:
    """How PyTorch takes apart what autograd writes, where no row does."""
    written = rules("backward")
    return {target: way for target, way in _of_pytorch().items() if str(target) not in written}


@cache
def _of_pytorch() -> dict[Any, Any]:
    table = torch.export.default_decompositions().items()
    return {target: way for target, way in table if "_backward" in str(target)}
