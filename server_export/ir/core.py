"""Write a graph in the operators that ExecuTorch lowers to, so that ExecuTorch has nothing left to decompose.

Operators that change the order of elements become copies. Their results are contiguous, so shapes alone
describe every value, and a reshape needs no copy of its own.
"""

from __future__ import annotations

from torch.fx import GraphModule

from server_export.ir.operators import rules
from server_export.ir.writer import apply_rules


def write_core_operators(graph_module: GraphModule) -> None:
    """Write a graph in core ATen operators, in place; its nodes have `meta["val"]`."""
    apply_rules(graph_module, rules("core"))
    graph_module.recompile()
