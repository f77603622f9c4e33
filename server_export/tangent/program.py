"""The graphs of a built program's methods, tangents included."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from prge.contract import Contract
from server_export.lowering import export_graph
from server_export.program import BuiltProgram, StackProgram, example_inputs
from server_export.tangent.transform import RankOne, differentiate


def export_programs(built: BuiltProgram) -> dict[str, torch.export.ExportedProgram]:
    """The graph of every method of a program, ready to be lowered.

    Raises:
        BundleError: the model can't be traced, or an operator of it has no forward-mode derivative.
    """
    return {method: _export(built.module, contract) for method, contract in built.contracts.items()}


def _export(module: StackProgram, contract: Contract) -> torch.export.ExportedProgram:
    if not contract.is_tangent:
        return export_graph(module, example_inputs(contract))
    count = len(contract.modules)

    def with_tangents(graph_module: GraphModule) -> GraphModule:
        names = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]
        seeds = dict.fromkeys(names[-count:], RankOne(contract.rows))
        return differentiate(graph_module, seeds, contract.queries)

    single = example_inputs(module.contract)
    return export_graph(module, single, with_tangents, example_inputs(contract))
