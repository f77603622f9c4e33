"""What of a graph is in no delegate, and what the stock engine answers with all the others in delegates."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.fx import GraphModule

from server_export.ir.rewriting import quantize_apart
from server_export.lower.program import lowered

_OPERATOR = re.compile(r"\w+\.(\w+)\.\w+")


def in_engine(graph_module: GraphModule, *inputs: torch.Tensor) -> tuple[set[str], torch.Tensor]:
    """Lower a graph of core operators with one output, and run it.

    Returns:
        Names of the operators that are in no delegate, without their overloads, and the output.
    """
    from executorch.runtime import Runtime

    quantize_apart(graph_module.graph)
    graph_module.recompile()
    with torch.no_grad():
        exported = torch.export.export(graph_module, inputs, strict=False)
    program = lowered({"forward": exported})
    nodes = program.exported_program("forward").graph.nodes
    calls = [_OPERATOR.fullmatch(str(node.target)) for node in nodes if node.op == "call_function"]
    method: Any = Runtime.get().load_program(program.buffer).load_method("forward")
    (output,) = method.execute(inputs)
    return {call[1] for call in calls if call}, output
