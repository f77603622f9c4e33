"""What of graphs is in no delegate, and what the stock engine answers with all the rest in delegates."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from server_export.ir.rewriting import quantize_apart
from server_export.lower.program import lowered

_OPERATOR = re.compile(r"\w+\.(\w+)\.\w+")


class Functions(nn.Module):
    """Calls each function with an input of its own: one graph of all, since each lowering takes a second."""

    def __init__(self, functions: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(each) for function, each in zip(self.functions, inputs, strict=True))


def in_engine(
    graph_module: GraphModule, inputs: Sequence[torch.Tensor]
) -> tuple[set[str], list[torch.Tensor]]:
    """Lower a graph of core operators, and run it.

    Returns:
        Names of the operators that are in no delegate, without their overloads, and the outputs.
    """
    from executorch.runtime import Runtime

    quantize_apart(graph_module.graph)
    graph_module.recompile()
    with torch.no_grad():
        exported = torch.export.export(graph_module, tuple(inputs), strict=False)
    program = lowered({"forward": exported})
    nodes = program.exported_program("forward").graph.nodes
    calls = [_OPERATOR.fullmatch(str(node.target)) for node in nodes if node.op == "call_function"]
    method: Any = Runtime.get().load_program(program.buffer).load_method("forward")
    return {call[1] for call in calls if call}, list(method.execute(inputs))
