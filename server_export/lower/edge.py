"""An exported graph in ExecuTorch's edge dialect, by renaming its operators.

ExecuTorch's own conversion traces a program three times and interprets it nine times more, node by node in
Python: two thirds of a lowering. Here a graph is made of core operators before it is traced for the last
time (`to_core`); what is left to do is to give each its other name. An operator that is none of them is
decomposed first, as ExecuTorch would do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from server_export.graph.log_softmax import GATHER_LOG_SOFTMAX, engine_form

aten = torch.ops.aten

_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_QUANTIZATION = ("choose_qparams_affine", "quantize_affine", "dequantize_affine")


def to_core(graph_module: GraphModule) -> GraphModule:
    """Write a graph that is still to be traced in core operators; equal ones are computed once.

    Args:
        graph_module: changed in place; get_attr nodes hold its constants, among them those of numbers that
            stood in the place of a tensor.

    Returns:
        The module of the new graph.
    """
    from torch.fx.passes.dialect.common.cse_pass import CSEPass

    graph = graph_module.graph
    for node in list(graph.nodes):
        rule = _TO_CORE.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            with graph.inserting_before(node):
                new = rule(graph, *node.args)
            new.meta = node.meta
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    _name_numbers(graph_module)
    # XNNPACK's partitioner wants every quantized layer to have its own quantization of what it multiplies.
    apart = {getattr(torch.ops.torchao, name) for name in _QUANTIZATION}
    result: GraphModule = CSEPass(apart)(graph_module).graph_module
    return result


def _silu(graph: Graph, source: Node) -> Node:
    gate = graph.call_function(aten.sigmoid.default, (source,))
    return graph.call_function(aten.mul.Tensor, (source, gate))


def _reversed_difference(graph: Graph, source: Node, other: float) -> Node:
    return graph.call_function(aten.sub.Tensor, (other, source))


def _zeros(graph: Graph, _: Node, shape: Sequence[int]) -> Node:
    return graph.call_function(aten.full.default, (list(shape), 0.0))


def _softmax(graph: Graph, source: Node, dim: int, *_: Any) -> Node:
    return graph.call_function(aten._softmax.default, (source, dim, False))


def _gather_log_softmax(graph: Graph, logits: Node, index: Node) -> Node:
    tracer = GraphAppendingTracer(graph)
    return engine_form(Proxy(logits, tracer), Proxy(index, tracer)).node


_TO_CORE: dict[Any, Callable[..., Node]] = {
    aten.silu.default: _silu,
    aten.rsub.Scalar: _reversed_difference,
    aten.new_zeros.default: _zeros,
    aten.softmax.int: _softmax,
    GATHER_LOG_SOFTMAX: _gather_log_softmax,
}


def _name_numbers(graph_module: GraphModule) -> None:
    """Make constants of numbers that are given for a tensor: the engine's kernels take tensors there."""
    constants: dict[tuple[float, torch.dtype], Node] = {}
    first = next(node for node in graph_module.graph.nodes if node.op != "placeholder")
    for node in graph_module.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        parameters = node.target._schema.arguments
        for index, (value, parameter) in enumerate(zip(node.args, parameters, strict=False)):
            if isinstance(value, int | float) and isinstance(parameter.type, torch.TensorType):
                # What tangents are made of has no value yet, and is float32.
                known = node.meta.get("val")
                dtype = torch.float32 if known is None else known.dtype
                if (value, dtype) not in constants:
                    name = f"number_{len(constants)}"
                    graph_module.register_buffer(name, torch.tensor(value, dtype=dtype))
                    with graph_module.graph.inserting_before(first):
                        constants[value, dtype] = graph_module.graph.get_attr(name)
                node.update_arg(index, constants[value, dtype])


def edge_program(program: ExportedProgram, config: Any) -> ExportedProgram:
    """The same program with edge operators; `config` is an EdgeCompileConfig."""
    from executorch.exir.verification.verifier import EXIREdgeDialectVerifier

    if not all(_has_edge_name(node) for node in program.graph.nodes):
        program = program.run_decompositions(_decompositions())
    graph, copies = Graph(), dict[Node, Node]()
    for node in program.graph.nodes:
        if node.target is aten.clone.default:
            # A copy that only changes strides; nothing here has any but the usual ones.
            copies[node] = copies[node.args[0]]
        elif node.target is not aten._assert_tensor_metadata.default:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if isinstance(node.target, torch._ops.OpOverload):
                _rename(copies[node], node)
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=[EXIREdgeDialectVerifier(edge_compile_config=config, class_only=True)],
    )


def _rename(copy: Node, node: Node) -> None:
    """Give a copied node its edge operator: the one whose result shares no memory with its argument."""
    from executorch.exir.passes.replace_aten_with_edge_pass import aten_to_edge

    target, source = node.target, copy.args[0]
    if target in _RESHAPES:
        target, copy.args = aten.view_copy.default, (source, list(node.meta["val"].shape))
    elif target is aten.transpose.int:
        order = list(range(node.meta["val"].dim()))
        first, second = (dim % len(order) for dim in node.args[1:])
        order[first], order[second] = second, first
        target, copy.args = aten.permute_copy.default, (source, order)
    elif target is aten.to.dtype:
        target, copy.args, copy.kwargs = aten._to_copy.default, (source,), {"dtype": node.args[1]}
    elif any(result.alias_info is not None for result in target._schema.returns):
        target = getattr(getattr(aten, f"{target.overloadpacket.__name__}_copy"), target._overloadname)
    copy.target = aten_to_edge(target)


def _has_edge_name(node: Node) -> bool:
    """Whether `_rename` knows the operator of a node, or there is none to rename."""
    target = node.target
    return (
        not isinstance(target, torch._ops.OpOverload)
        or torch.Tag.core in target.tags
        or target in (*_RESHAPES, aten.transpose.int, aten.to.dtype, aten.clone.default, aten.linear.default)
        or target is aten._assert_tensor_metadata.default
        or target.overloadpacket.__name__ in _QUANTIZATION
    )


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's, but for what XNNPACK takes whole."""
    table = torch.export.default_decompositions()
    whole = (aten.linear.default, *(getattr(torch.ops.torchao, name).default for name in _QUANTIZATION))
    for target in whole:
        table.pop(target, None)
    return table
