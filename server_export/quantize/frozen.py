"""The frozen tensors of a block type, and how they are made from a block's weights.

    a block's weights -> what the graph computes from weights alone, such as 1 + weight -> codes and scales

The graph of a block type has tensors without memory in their place, which the blocks of the type fill in
turn.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from server_export.ir.constants import CONSTANT_PREFIX
from server_export.ir.markers import BATCH, COPIES, TOKENS
from server_export.ir.modules import copy_graph_module, make_graph_module, remove_unused_attributes
from server_export.ir.rewriting import remove_identities
from server_export.ir.shapes import to_meta
from server_export.ir.traversal import descendants
from server_export.quantize.quantization import (
    EMBEDDING_BYTES,
    GROUP_SIZE,
    ROWS_AT_ONCE,
    Int4Weight,
    int4_weight,
    int8_table,
    int8_weight,
)
from server_export.trace.cutting import ModelBlock

aten = torch.ops.aten
torchao = torch.ops.torchao

_BYTE = (torch.int8, -128, 127)
_NIBBLE = (torch.int8, -8, 7)
ADAPTER_WEIGHT = "lora_a"


@dataclass
class FrozenTensors:
    """How a block's weights become the tensors that the graph of its type reads.

    Attributes:
        computed: takes the weights in order and returns the tensors of `names`.
        names: the names of these tensors.
        layers: those that are stored as codes of linear layers, and whether the codes are int4.
        embeddings: those that are stored as codes of embedding tables, and their number of rows.
    """

    computed: GraphModule
    names: tuple[str, ...]
    layers: dict[str, bool] = field(default_factory=dict)
    embeddings: dict[str, int] = field(default_factory=dict)

    @property
    def stored(self) -> set[str]:
        """The names of the tensors that differ from block to block."""
        parts = (codes_name, scale_name, zero_point_name)
        quantized = {part(name) for name in self.layers for part in parts}
        quantized |= {part(name) for name in self.embeddings for part in parts[:2]}
        return quantized | set(self.names) - set(self.layers) - set(self.embeddings)

    @property
    def tables(self) -> set[int]:
        """The positions among the weights of embedding tables that are quantized as they are stored."""
        graph = self.computed.graph
        output = graph.output_node()
        by_name = dict(zip(self.names, output.args[0], strict=True))
        tables = {by_name[name] for name in self.embeddings if {*by_name[name].users} == {output}}
        return {
            position for position, node in enumerate(graph.find_nodes(op="placeholder")) if node in tables
        }

    def tensors(
        self,
        weights: Sequence[torch.Tensor | Iterable[torch.Tensor]],
        rounded: Mapping[str, Int4Weight] = MappingProxyType({}),
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and tensors of the graph, made from a block's weights.

        Args:
            weights: the block's weights f32 in its own order. Those of `tables` may be iterables over parts
                of the rows, so that none of them is in memory as a whole.
            rounded: the codes of int4 layers; other layers are rounded here.
        """
        with torch.no_grad():
            for name, tensor in zip(self.names, self.computed(*weights), strict=True):
                if name in self.layers:
                    if self.layers[name] and name in rounded:
                        codes, scale = rounded[name].codes, rounded[name].scale
                    else:
                        quantized: Any = int4_weight(tensor) if self.layers[name] else int8_weight(tensor)
                        codes, scale = quantized.qdata, quantized.scale
                    yield codes_name(name), codes
                    yield scale_name(name), scale
                    yield zero_point_name(name), torch.zeros(scale.shape, dtype=torch.int8)
                elif name in self.embeddings:
                    is_whole = isinstance(tensor, torch.Tensor)
                    parts = tensor.split(ROWS_AT_ONCE) if is_whole else tensor
                    codes, scales = int8_table(parts, self.embeddings[name])
                    yield codes_name(name), codes
                    yield scale_name(name), scales
                else:
                    yield name, tensor


def codes_name(name: str) -> str:
    """Return the name of a quantized tensor's codes."""
    return _without_dots(f"{name}_codes")


def scale_name(name: str) -> str:
    """Return the name of a quantized tensor's scales."""
    return _without_dots(f"{name}_scale")


def zero_point_name(name: str) -> str:
    """Return the name of a quantized tensor's zero points."""
    return _without_dots(f"{name}_zero_point")


def _without_dots(name: str) -> str:
    """Return a name without dots, as a module requires for its own tensors."""
    return name.replace(".", "_")


def freeze(
    block: ModelBlock, scheme: str, is_head: bool = False, int8: Collection[str] = ()
) -> tuple[GraphModule, FrozenTensors]:
    """Return the quantized graph of a block's type, and how its tensors are made.

    Args:
        block: any block of the type.
        scheme: `fp32`, `8da8w` or `8da4w`; a head's layers are int8 in the last one too.
        is_head: whether the block computes log-probabilities.
        int8: names of weights that are int8 in `8da4w`.
    """
    graph_module = copy_graph_module(block.graph_module)
    remove_identities(graph_module.graph)
    _add_biases(graph_module.graph)
    frozen = _extract_computed(graph_module, block.weights)
    if scheme != "fp32":
        for node in list(graph_module.graph.nodes):
            if node.target is aten.linear.default and _is_frozen_layer(node) and not _is_router(node):
                is_int4 = scheme == "8da4w" and not is_head and str(node.args[1].target) not in int8
                _quantize_layer(graph_module, node, frozen, is_int4)
            elif node.target is aten.embedding.default and _is_large(node.args[0]):
                _quantize_embedding(graph_module, node, frozen)
    graph_module.graph.eliminate_dead_code()
    remove_unused_attributes(graph_module)
    graph_module.recompile()
    return graph_module, frozen


def _add_biases(graph: Graph) -> None:
    """Move the biases of linear layers into additions after the layers.

    The tangents of a layer use the same weight without a bias. XNNPACK identifies a packed quantized layer by
    its weight alone, so it would confuse the two.
    """
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        source, weight, *bias = node.args
        if bias and bias[0] is not None:
            with graph.inserting_after(node):
                total = graph.call_function(aten.add.Tensor, (node, bias[0]))
            total.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)
            node.args = (source, weight)


def _extract_computed(graph_module: GraphModule, weights: Sequence[str]) -> FrozenTensors:
    """Move what depends on weights alone out of a graph."""
    constant: set[Node] = set()
    for node in graph_module.graph.nodes:
        sources = node.all_input_nodes
        is_computed = node.op == "call_function" and sources and constant.issuperset(sources)
        if node.op == "get_attr" or (is_computed and not _depends_on_call(node)):
            constant.add(node)
    read = [node for node in graph_module.graph.nodes if node in constant and set(node.users) - constant]
    graph = Graph()
    values: dict[Node, Node] = {}
    placeholders = {name: graph.placeholder(f"weight_{number}") for number, name in enumerate(weights)}
    for node in graph_module.graph.nodes:
        if node in constant:
            is_weight = node.op == "get_attr"
            values[node] = (
                placeholders[str(node.target)] if is_weight else graph.node_copy(node, values.__getitem__)
            )
    names: dict[str, Node] = {}
    for number, node in enumerate(read):
        name = str(node.target) if node.op == "get_attr" else f"computed_{number}"
        names[name] = values[node]
        if node.op != "get_attr":
            _replace_by_tensor(graph_module, node, name, constant)
    graph.output(tuple(names.values()))
    graph.eliminate_dead_code()
    return FrozenTensors(make_graph_module(graph_module, graph), tuple(names))


def _depends_on_call(node: Node) -> bool:
    """Return whether a value's shape depends on the call, such as a weight that is repeated for each row."""
    value = node.meta.get("val")
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return any(size and size % marker == 0 for size in shape for marker in (BATCH, TOKENS, COPIES))


def _replace_by_tensor(graph_module: GraphModule, node: Node, name: str, constant: set[Node]) -> None:
    with graph_module.graph.inserting_before(node):
        new = _tensor(graph_module, name, tuple(node.meta["val"].shape), node.meta["val"].dtype)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in constant)


def _tensor(graph_module: GraphModule, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Node:
    """Return a get_attr node of a tensor without memory, at the insertion point of the graph."""
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    if not hasattr(graph_module, name):
        graph_module.register_buffer(name, tensor)
    node = graph_module.graph.get_attr(name)
    node.meta["val"] = tensor
    return node


def _is_frozen_layer(node: Node) -> bool:
    """Return whether a layer belongs to the model and is large enough to be quantized.

    A layer with a single output is not, and neither is one that a pass inserted, such as a rotation.
    """
    weight = node.args[1]
    if not isinstance(weight, Node) or weight.op != "get_attr" or len(weight.meta["val"]) == 1:
        return False
    return not _is_of_adapter(str(weight.target)) and not str(weight.target).startswith(CONSTANT_PREFIX)


def _is_router(layer: Node) -> bool:
    """Return whether a layer is a router: rounding its weights would choose other experts."""
    dependents = descendants(layer.users, until=lambda node: node.target is aten.linear.default)
    return any(node.target is aten.topk.default for node in dependents)


def _is_of_adapter(name: str) -> bool:
    return name.rpartition(".")[2] == ADAPTER_WEIGHT


def _is_large(weight: Any) -> bool:
    return weight.op == "get_attr" and weight.meta["val"].numel() * 4 >= EMBEDDING_BYTES


def _quantize_layer(graph_module: GraphModule, node: Node, frozen: FrozenTensors, in_groups: bool) -> None:
    source, weight, *bias = node.args
    name, (outputs, inputs) = str(weight.target), weight.meta["val"].shape
    in_groups = in_groups and inputs % GROUP_SIZE == 0
    frozen.layers[name] = in_groups
    graph = graph_module.graph
    rank = source.meta["val"].dim()
    row, block = [*[1] * (rank - 1), inputs], [1, GROUP_SIZE if in_groups else inputs]
    scales = (outputs, inputs // block[1])
    with graph.inserting_before(node):
        codes = _tensor(graph_module, codes_name(name), (outputs, inputs), torch.int8)
        scale = _tensor(
            graph_module, scale_name(name), scales, torch.bfloat16 if in_groups else torch.float32
        )
        zero_point = _tensor(graph_module, zero_point_name(name), scales, torch.int8)
        qparams = _call(
            torchao.choose_qparams_affine.default, source, "ASYMMETRIC", row, *_BYTE, None, None, torch.int8
        )
        parameters = [_call(operator.getitem, qparams, index) for index in range(2)]
        rounded = _call(torchao.quantize_affine.default, source, row, *parameters, *_BYTE)
        dequantized = _call(torchao.dequantize_affine.default, rounded, row, *parameters, *_BYTE)
        limits = _NIBBLE if in_groups else _BYTE
        weight_values = _call(torchao.dequantize_affine.default, codes, block, scale, zero_point, *limits)
    node.args = (dequantized, weight_values, *bias)


def _call(target: Any, source: Node, *arguments: Any, **named: Any) -> Node:
    """Call an operator at the insertion point of the graph."""
    node = source.graph.call_function(target, (source, *arguments), named)
    values, named_values = torch.fx.node.map_arg(((source, *arguments), named), lambda n: n.meta["val"])
    node.meta["val"] = to_meta(target(*values, **named_values))
    return node


def _quantize_embedding(graph_module: GraphModule, node: Node, frozen: FrozenTensors) -> None:
    table, *rest = node.args
    name, (rows, width) = str(table.target), table.meta["val"].shape
    frozen.embeddings[name] = rows
    graph = graph_module.graph
    with graph.inserting_before(node):
        codes = _tensor(graph_module, codes_name(name), (rows, width), torch.int8)
        scale = _tensor(graph_module, scale_name(name), (rows, 1), torch.float32)
        numbers = _call(
            aten._to_copy.default, _call(aten.embedding.default, codes, rest[0]), dtype=torch.float32
        )
        product = _call(aten.mul.Tensor, numbers, _call(aten.embedding.default, scale, rest[0]))
    node.replace_all_uses_with(product)
    graph.erase_node(node)
