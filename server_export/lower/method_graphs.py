"""The graphs of a built program's methods: cut in two, rows shared, with tangents or a backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch.fx import GraphModule

from prge.contract import TRUNK_PREFIX, Contract, TensorSpec
from server_export.derive.backprop.joint import backpropagate
from server_export.derive.tangent.transform import RankOne, differentiate
from server_export.graph.rotation import rotate
from server_export.graph.row_count import TRACED_ROWS, with_rows
from server_export.graph.row_sharing import share_rows
from server_export.graph.trunk import split
from server_export.lower.lowering import retraced, rewritten_graph
from server_export.model.program import BuiltProgram, example_inputs


def export_programs(built: BuiltProgram) -> dict[str, torch.export.ExportedProgram]:
    """The graph of every method of a program, ready to be lowered.

    Raises:
        BundleError: the model can't be traced, or an operator of it has no derivative.
        ConfigError: the step can't be cut into trunk and step.
    """
    programs = {}
    for method, contract, graph_module in _graphs(built):
        if built.has_trunk and method in built.steps:
            trunk, graph_module = _cut(graph_module, contract)
            name = built.trunk_method(contract)
            trunk_contract, contract = contract.divided(_crossing(trunk))
            rotate(trunk)
            programs[name] = retraced(trunk, example_inputs(trunk_contract))
        programs[method] = retraced(_transformed(graph_module, contract), example_inputs(contract))
    return programs


def _graphs(built: BuiltProgram) -> Iterator[tuple[str, Contract, GraphModule]]:
    """Method, contract and graph of all its rows; methods that differ in their rows alone share a trace."""
    plain = {
        method: replace(contract, kind="stack", queries=0, classes=0, shared_rows=False)
        for method, contract in built.contracts.items()
    }
    alike = Counter(map(_of_any_rows, plain.values()))
    traces: dict[Contract, GraphModule] = {}
    for method, contract in plain.items():
        any_rows = _of_any_rows(contract)
        graph_module = None
        if contract.copies == 1 and alike[any_rows] > 1:
            if any_rows not in traces:
                traces[any_rows] = rewritten_graph(built.module, example_inputs(any_rows))
            graph_module = with_rows(traces[any_rows], contract.batch_size)
        if graph_module is None:
            graph_module = rewritten_graph(built.module, example_inputs(contract))
        yield method, built.contracts[method], graph_module


def _of_any_rows(contract: Contract) -> Contract:
    return replace(contract, batch_size=TRACED_ROWS)


def cut_of(
    programs: Mapping[str, torch.export.ExportedProgram], built: BuiltProgram, length: int | None = None
) -> tuple[TensorSpec, ...]:
    """What crosses from the exported trunk to the step above it; nothing in a program without trunk.

    `length` is that of a shorter variant.
    """
    if not built.has_trunk:
        return ()
    contract = built.contract if length is None else built.contract.shortened(length)
    return _crossing(programs[built.trunk_method(contract)].graph_module)


def _crossing(trunk: GraphModule) -> tuple[TensorSpec, ...]:
    (output,) = (node for node in trunk.graph.nodes if node.op == "output")
    shapes = [tuple(node.meta["val"].shape) for node in output.args[0]]
    return tuple(TensorSpec(f"{TRUNK_PREFIX}{index}", "float32", shape) for index, shape in enumerate(shapes))


def _cut(graph_module: GraphModule, contract: Contract) -> tuple[GraphModule, GraphModule]:
    names = _placeholders(graph_module)
    inputs = names[:2] if contract.is_encoder else names[:1]
    trunk, step = split(graph_module, inputs, names[-len(contract.modules) :])
    return (share_rows(trunk, (), contract.copies) if contract.shared_rows else trunk), step


def _transformed(graph_module: GraphModule, contract: Contract) -> GraphModule:
    """A graph of all rows as its contract has it: rows shared, with tangents or with a backward pass."""
    adapter = _placeholders(graph_module)[-len(contract.modules) :]
    if contract.shared_rows:
        graph_module = share_rows(graph_module, adapter, contract.copies)
    rotate(graph_module)
    if contract.is_tangent:
        return differentiate(graph_module, dict.fromkeys(adapter, RankOne(contract.rows)), contract.queries)
    if contract.is_exact:
        return backpropagate(graph_module, contract)
    return graph_module


def _placeholders(graph_module: GraphModule) -> list[str]:
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]
