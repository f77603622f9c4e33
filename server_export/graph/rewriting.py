"""Rewriting of an exported graph, the same for every architecture, into what XNNPACK takes whole.

constants       rotary tables, masks, position embeddings, 1 + weight: computed here, not on the device
mean, layer_norm    a mean over the last dimension becomes a linear layer with a constant row 1/d:
                XNNPACK has no such mean, and every normalization would end a delegate
rotary embedding    a product with one matrix per position, where these are small
split, select, unsqueeze, squeeze, pow    slices, reshapes and products
gelu            its tanh form, which XNNPACK would take for the exact one
dropout, casts to the same type, assertions    removed
quantization    of an activation that several layers read: once
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from server_export.graph.rotation import find_rotations
from server_export.graph.shapes import Shapes, without_memory

aten = torch.ops.aten

_IDENTITIES = {aten.alias.default, aten.detach.default, aten.dropout.default, aten.lift_fresh_copy.default}
_CASTS = {
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.expand.default,
    aten.expand_as.default,
}
_ENLARGING = {
    aten.expand.default,
    aten.expand_as.default,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
}

# A product costs the square of a head's width, written out it costs the width: wider heads gain nothing.
_WIDEST_ROTATION = 128
# Numbers of all positions' matrices, 4 MiB of them: more would be read from memory, not from the cache.
_LARGEST_ROTATION = 1 << 20


def rewrite(graph_module: GraphModule) -> None:
    """Rewrite the graph of an unlifted exported program in place; all its nodes carry `meta["val"]`."""
    _unwrap_quantized_weights(graph_module)
    constants = _Constants(graph_module)
    _remove_identities(graph_module)
    constants.fold()
    _share_quantizations(graph_module.graph)
    for node in list(graph_module.graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            rule(node, constants)
    graph_module.graph.eliminate_dead_code()
    fill_in_values(graph_module)
    graph_module.delete_all_unused_submodules()
    _remove_unused_attributes(graph_module)
    graph_module.graph.lint()
    graph_module.recompile()


def _unwrap_quantized_weights(graph_module: GraphModule) -> None:
    """Make constants of the codes, scales and zero points that are read from quantized weights.

    Zero points that are all 0 are one constant: a lowering looks through all constants for every operator.
    """
    zeros: dict[tuple[torch.dtype, torch.Size], str] = {}
    for node in list(graph_module.graph.nodes):
        if node.target is torch.ops.export.access_subclass_inner_tensor.default:
            weight, part = node.args
            name = f"{str(weight.target).replace('.', '_')}_{part}"
            tensor = getattr(attribute(graph_module, str(weight.target)), part).detach()
            if part == "zero_point" and not bool(tensor.any()):
                name = zeros.setdefault((tensor.dtype, tensor.shape), name)
            if not hasattr(graph_module, name):
                graph_module.register_buffer(name, tensor)
            _build(node, partial(Graph.get_attr, qualified_name=name))


class _Constants:
    """Tensors of the graph that don't depend on its inputs; equal ones are stored once."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module
        self.names: dict[tuple[torch.dtype, torch.Size, bytes], str] = {}

    def node(self, tensor: torch.Tensor, before: Node) -> Node:
        """A get_attr node for `tensor`."""
        tensor = tensor.detach().contiguous()
        digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
        key = (tensor.dtype, tensor.shape, digest)
        if key not in self.names:
            numbers = (f"constant_{number}" for number in count(len(self.names)))
            name = next(name for name in numbers if not hasattr(self.graph_module, name))
            self.graph_module.register_buffer(name, tensor, persistent=True)
            self.names[key] = name
        with self.graph_module.graph.inserting_before(before):
            node = self.graph_module.graph.get_attr(self.names[key])
        node.meta["val"] = tensor.to("meta")
        return node

    def fold(self) -> None:
        """Compute every node that has constant inputs only."""
        values: dict[Node, Any] = {}
        for node in self.graph_module.graph.nodes:
            if node.op == "get_attr":
                tensor = attribute(self.graph_module, str(node.target))
                # A quantized weight is a subclass with its own meaning of every operator.
                if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                    values[node] = tensor
            elif self._is_foldable(node, values):
                arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                with torch.no_grad():
                    values[node] = node.target(*arguments, **named)
        computed = [
            node for node in values if node.op == "call_function" and isinstance(values[node], torch.Tensor)
        ]
        for node in computed:
            if any(user not in values for user in node.users):
                node.replace_all_uses_with(
                    self.node(values[node], node), delete_user_cb=lambda user: user not in values
                )
        self.graph_module.graph.eliminate_dead_code()

    @staticmethod
    def _is_foldable(node: Node, values: dict[Node, Any]) -> bool:
        if node.op != "call_function" or any(source not in values for source in node.all_input_nodes):
            return False
        if node.target is operator.getitem:
            return True
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
            return False
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return False
        return (
            node.target not in _ENLARGING
            or node.meta["val"].numel() == node.all_input_nodes[0].meta["val"].numel()
        )


def _remove_identities(graph_module: GraphModule) -> None:
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.op == "call_function" and (node.target in _IDENTITIES or _is_noop_cast(node)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _share_quantizations(graph: Graph) -> None:
    """Quantize an activation once for all layers that read it."""
    seen: dict[tuple[str, str, str], Node] = {}
    for node in list(graph.nodes):
        if str(node.target).startswith("torchao.") or node.target is operator.getitem:
            # Nodes are written as their names, which no two of them share.
            same = seen.setdefault((str(node.target), str(node.args), str(node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _is_noop_cast(node: Node) -> bool:
    if node.target not in _CASTS:
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if before is None or after is None:
        return False
    return before.dtype == after.dtype and before.shape == after.shape


def fill_in_values(graph_module: GraphModule) -> None:
    """Give the nodes that rewriting made a `meta["val"]`: a tensor without memory."""

    shapes = Shapes()
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = without_memory(attribute(graph_module, str(node.target)))
        if node.op == "call_function" and "val" not in node.meta:
            arguments, named = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda source: without_memory(source.meta["val"])
            )
            node.meta["val"] = shapes.of(node.target, arguments, named)


def rotate(graph_module: GraphModule) -> None:
    """Turn the rotary embeddings of a rewritten graph into one matrix product each, in place.

    Written out, a rotation passes ten times over queries and keys: slices, a negation, two products with
    tables, a sum, a scale. Which form a program has must not depend on its rows: the scalars of all numbers
    of copies are the same. The product takes positions before rows, so what looks at rows comes first.
    """
    fill_in_values(graph_module)
    constants = _Constants(graph_module)
    for rotation in find_rotations(graph_module):
        length, width = rotation.source.meta["val"].shape[-2:]
        if rotates_by_product(length, width):
            table = constants.node(rotation.matrices(), rotation.result)
            _build(rotation.result, partial(_turned, rotation.source, table))
    graph_module.graph.eliminate_dead_code()
    fill_in_values(graph_module)
    _remove_unused_attributes(graph_module)
    graph_module.recompile()


def rotates_by_product(length: int, width: int) -> bool:
    """Whether `rotate` makes products of the rotations of heads of this width."""
    return width <= _WIDEST_ROTATION and length * width * width <= _LARGEST_ROTATION


def _turned(source: Node, table: Node, graph: Graph) -> Node:
    rows, heads, length, width = source.meta["val"].shape

    def call(target: Any, *arguments: Any) -> Node:
        return graph.call_function(target, arguments)

    by_position = call(aten.permute.default, source, [2, 0, 1, 3])
    flat = call(aten.reshape.default, by_position, [length, rows * heads, width])
    turned = call(aten.reshape.default, call(aten.bmm.default, flat, table), [length, rows, heads, width])
    return call(aten.permute.default, turned, [1, 2, 0, 3])


def _build(node: Node, make: Callable[[Graph], Node]) -> None:
    """Replace `node` by what `make` builds before it."""
    graph = node.graph
    with graph.inserting_before(node):
        new = make(graph)
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _mean_row(source: Node, constants: _Constants, before: Node) -> Node:
    value = source.meta["val"]
    width = value.shape[-1]
    return constants.node(torch.full((1, width), 1.0 / width, dtype=value.dtype), before)


def _mean(node: Node, constants: _Constants) -> None:
    source, dims, *rest = node.args
    value = source.meta["val"]
    keep = bool(rest[0]) if rest else bool(node.kwargs.get("keepdim", False))
    if (
        dims is None
        or [dim % value.dim() for dim in dims] != [value.dim() - 1]
        or not value.dtype.is_floating_point
    ):
        return
    row = _mean_row(source, constants, node)

    def make(graph: Graph) -> Node:
        mean = graph.call_function(aten.linear.default, (source, row))
        return (
            mean if keep else graph.call_function(aten.reshape.default, (mean, list(node.meta["val"].shape)))
        )

    _build(node, make)


def _layer_norm(node: Node, constants: _Constants) -> None:
    source, shape, *rest = node.args
    if len(shape) != 1:
        return
    weight, bias, epsilon = (list(rest) + [None, None, 1e-5][len(rest) :])[:3]
    row = _mean_row(source, constants, node)

    def make(graph: Graph) -> Node:
        def call(target: Any, *arguments: Any) -> Node:
            return graph.call_function(target, arguments)

        # The variance of what is centred already: E[x^2] - E[x]^2 would cancel.
        centred = call(aten.sub.Tensor, source, call(aten.linear.default, source, row))
        variance = call(aten.linear.default, call(aten.mul.Tensor, centred, centred), row)
        result = call(
            aten.mul.Tensor, centred, call(aten.rsqrt.default, call(aten.add.Tensor, variance, epsilon))
        )
        result = result if weight is None else call(aten.mul.Tensor, result, weight)
        return result if bias is None else call(aten.add.Tensor, result, bias)

    _build(node, make)


def _power(node: Node, _: _Constants) -> None:
    source, exponent = node.args
    if exponent not in (2, 3):
        return

    def make(graph: Graph) -> Node:
        square = graph.call_function(aten.mul.Tensor, (source, source))
        return square if exponent == 2 else graph.call_function(aten.mul.Tensor, (square, source))

    _build(node, make)


def _gelu(node: Node, _: _Constants) -> None:
    """XNNPACK computes the exact form whatever the node asks for; the other differs by up to 5e-4."""
    if node.kwargs.get("approximate", "none") != "tanh":
        return
    source = node.args[0]

    def make(graph: Graph) -> Node:
        def call(target: Any, *arguments: Any) -> Node:
            return graph.call_function(target, arguments)

        # 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), the tanh as a sigmoid of twice as much
        cube = call(aten.mul.Tensor, call(aten.mul.Tensor, source, source), source)
        inner = call(aten.add.Tensor, source, call(aten.mul.Tensor, cube, 0.044715))
        gate = call(aten.sigmoid.default, call(aten.mul.Tensor, inner, 2 * math.sqrt(2 / math.pi)))
        return call(aten.mul.Tensor, source, gate)

    _build(node, make)


def _cat(node: Node, _: _Constants) -> None:
    """Drop empty parts: partial rotary positions leave some, and XNNPACK takes none."""
    parts, *rest = node.args
    filled = [part for part in parts if part.meta["val"].numel()]
    if len(filled) == 1:
        node.replace_all_uses_with(filled[0])
        node.graph.erase_node(node)
    elif len(filled) < len(parts):
        node.args = (filled, *rest)


def _reshape(node: Node, _: _Constants) -> None:
    shape = list(node.meta["val"].shape)
    _build(node, lambda graph: graph.call_function(aten.reshape.default, (node.args[0], shape)))


def _select(node: Node, _: _Constants) -> None:
    source, dim, index = node.args
    size = source.meta["val"].shape[dim]
    start = index % size
    shape = list(node.meta["val"].shape)

    def make(graph: Graph) -> Node:
        part = graph.call_function(aten.slice.Tensor, (source, dim, start, start + 1))
        return graph.call_function(aten.reshape.default, (part, shape))

    _build(node, make)


def _split(node: Node, _: _Constants) -> None:
    source = node.args[0]
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    starts = [0]
    for part in node.meta["val"]:
        starts.append(starts[-1] + part.shape[dim])
    for user in list(node.users):
        index = user.args[1]
        bounds = (source, dim, starts[index], starts[index + 1])
        _build(user, partial(Graph.call_function, the_function=aten.slice.Tensor, args=bounds))
    node.graph.erase_node(node)


_RULES: dict[Any, Callable[[Node, _Constants], None]] = {
    aten.mean.dim: _mean,
    aten.layer_norm.default: _layer_norm,
    aten.pow.Tensor_Scalar: _power,
    aten.gelu.default: _gelu,
    aten.cat.default: _cat,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.flatten.using_ints: _reshape,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
}


def as_module(root: GraphModule, graph: Graph) -> GraphModule:
    """A module of a new graph with the constants of `root`.

    Its Python code is generated when it is called for the first time; most are only read.
    """
    return _LazyGraphModule(root, graph)


def attribute(graph_module: GraphModule, name: str) -> Any:
    """What a get_attr node of the module with this target reads."""
    value: Any = graph_module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _remove_unused_attributes(graph_module: GraphModule) -> None:
    """Drop parameters and buffers that no node reads, so that they don't reach the program."""
    used = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    names = [name for name, _ in graph_module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in graph_module.named_buffers(remove_duplicate=False)]
    for name in names:
        if name not in used:
            parent, _, child = name.rpartition(".")
            owner = graph_module.get_submodule(parent) if parent else graph_module
            delattr(owner, child)
