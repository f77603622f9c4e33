"""Operators of a graph as ExecuTorch lowers them, so that it has none to take apart.

What changes the order of numbers writes them anew: shapes of unknown sizes are then all there is to know of a
value, and a reshape needs no copy of its own.
"""

from __future__ import annotations

from torch.fx import GraphModule

from server_export.ir.operators import rules
from server_export.ir.writer import apply_rules


def write_core_operators(graph_module: GraphModule) -> None:
    """Write a graph in core operators, in place; its nodes carry `meta["val"]`."""
    apply_rules(graph_module, rules("core"))
    graph_module.recompile()
