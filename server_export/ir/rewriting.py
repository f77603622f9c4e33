"""Rewriting of an exported graph, the same for every architecture, into what XNNPACK takes whole.

constants       rotary tables, masks, position embeddings, 1 + weight: computed here, not on the device
mean, layer_norm    a mean over the last dimension becomes a linear layer with a constant row 1/d:
                XNNPACK has no such mean, and every normalization would end a delegate
split, select, unsqueeze, squeeze, pow, matmul, stack, slice_scatter
                slices, reshapes, products and parts side by side
gelu            its tanh form, which XNNPACK would take for the exact one
dropout, casts to the same type, assertions    removed
quantization    of an activation that several layers read: once
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from prge.errors import refused_as
from server_export.ir.constants import Constants
from server_export.ir.modules import attribute, remove_unused_attributes
from server_export.ir.writer import Rule, Writer, apply_rules, registrar
from server_export.library_errors import torch_export_errors

aten = torch.ops.aten

_ROUNDED = "quantized_decomposed.dequantize_per_token.default"
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
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int}
# What is taken out, or read by rules for what is made of it.
KEPT = {*_IDENTITIES, *_CASTS, *_SPLITS}


def rewritten_graph(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> GraphModule:
    """The graph of a module for inputs of these shapes, in operators that XNNPACK takes.

    Raises:
        Refusal: torch.export can't trace it.
    """
    remedy = "the architecture isn't supported; take another checkpoint, and please report it"
    with torch.no_grad():
        with refused_as(
            "not-traceable", "torch.export can't trace the program", torch_export_errors(), remedy=remedy
        ):
            exported = torch.export.export(module, inputs, strict=False)
        graph_module: GraphModule = exported.module(check_guards=False)
        rewrite(graph_module)
    return graph_module


def rewrite(graph_module: GraphModule, has_weights: bool = True) -> None:
    """Write a traced graph in operators that XNNPACK takes, in place; all its nodes carry `meta["val"]`.

    graph_module = torch.export.export(module, inputs).module(check_guards=False)
    rewrite(graph_module)

    Args:
        graph_module: of a model or of a part.
        has_weights: whether its weights have their numbers, of which constants are computed.
    """
    _unwrap_quantized_weights(graph_module)
    constants = Constants(graph_module)
    remove_identities(graph_module.graph)
    constants.fold(has_weights)
    _share_quantizations(graph_module.graph)
    apply_rules(graph_module, RULES, constants)
    graph_module.delete_all_unused_submodules()
    remove_unused_attributes(graph_module)
    graph_module.graph.lint()
    graph_module.recompile()


def _unwrap_quantized_weights(graph_module: GraphModule) -> None:
    """Make constants of the codes, scales and zero points that are read from quantized weights.

    Zero points that are all 0 are one constant: a lowering looks through all constants for every operator.
    """
    graph = graph_module.graph
    zeros: dict[tuple[torch.dtype, torch.Size], str] = {}
    for node in list(graph.nodes):
        if node.target is torch.ops.export.access_subclass_inner_tensor.default:
            weight, part = node.args
            name = f"{str(weight.target).replace('.', '_')}_{part}"
            tensor = getattr(attribute(graph_module, str(weight.target)), part).detach()
            if part == "zero_point" and not bool(tensor.any()):
                name = zeros.setdefault((tensor.dtype, tensor.shape), name)
            if not hasattr(graph_module, name):
                graph_module.register_buffer(name, tensor)
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            constant.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(constant)
            graph.erase_node(node)


def remove_identities(graph: Graph) -> None:
    """Take out operators that change nothing, such as casts to the same type, in place."""
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.op == "call_function" and (
            node.target in _IDENTITIES or _is_noop_cast(node) or _is_whole_slice(node)
        ):
            for user in node.users:
                # What a copy laid out anew may be viewed otherwise than what it was made of.
                user.target = aten.reshape.default if user.target is aten.view.default else user.target
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _is_whole_slice(node: Node) -> bool:
    return node.target is aten.slice.Tensor and node.args[0].meta["val"].shape == node.meta["val"].shape


def _is_noop_cast(node: Node) -> bool:
    if node.target not in _CASTS:
        return False
    source = node.args[0]
    before, after = source.meta.get("val") if isinstance(source, Node) else None, node.meta.get("val")
    if before is None or after is None:
        return False
    return before.dtype == after.dtype and before.shape == after.shape


def _share_quantizations(graph: Graph) -> None:
    """Quantize an activation once for all layers that read it."""
    share_equal_calls(
        graph, lambda node: str(node.target).startswith("torchao.") or node.target is operator.getitem
    )


def share_equal_calls(graph: Graph, is_meant: Callable[[Node], bool] = lambda node: True) -> None:
    """Compute once what several nodes compute of the same, in place."""
    seen: dict[tuple[str, str, str], Node] = {}
    for node in list(graph.nodes):
        if node.op in ("call_function", "get_attr") and is_meant(node):
            # Nodes are written as their names, which no two of them share.
            same = seen.setdefault((str(node.target), str(node.args), str(node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def quantize_apart(graph: Graph) -> None:
    """Let every layer quantize what it multiplies: partitions of layers that share it would be circular.

    So would be one of a layer that is used twice, if both uses restored its weight together.
    """
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        restored, weight = node.args[:2]
        if is_dequantization(weight) and len(weight.users) > 1:
            with graph.inserting_before(node):
                node.replace_input_with(weight, graph.node_copy(weight, lambda source: source))
        if str(restored.target) != _ROUNDED or len(restored.users) == 1:
            continue
        codes = restored.args[0]
        scale, zero_point = codes.args[1:3]
        own: dict[Node, Node] = {source: source for source in scale.args[0].all_input_nodes}
        with graph.inserting_before(node):
            for shared in (scale.args[0], scale, zero_point, codes, restored):
                own |= {source: source for source in shared.all_input_nodes if source not in own}
                own[shared] = graph.node_copy(shared, own.__getitem__)
        node.replace_input_with(restored, own[restored])
    graph.eliminate_dead_code()


def is_dequantization(node: Node) -> bool:
    """Whether a node restores a quantized weight."""
    return str(node.target) == "torchao.dequantize_affine.default"


RULES: dict[str, Rule] = {}
_rule = registrar(RULES)


def _mean_row(writer: Writer, source: Node) -> Node:
    """The weight of a linear layer that takes the mean over the last dimension."""
    value = source.meta["val"]
    width = value.shape[-1]
    return writer.constant(torch.full((1, width), 1.0 / width, dtype=value.dtype))


@_rule(aten.mean.dim)
def _mean(
    writer: Writer, node: Node, source: Node, dims: Sequence[int] | None, keepdim: bool = False, **_: Any
) -> Node | None:
    value = source.meta["val"]
    if dims is None or [dim % value.dim() for dim in dims] != [value.dim() - 1]:
        return None
    if not value.dtype.is_floating_point:
        return None
    mean = writer.call(aten.linear.default, source, _mean_row(writer, source))
    return mean if keepdim else writer.reshape(mean, node.meta["val"].shape)


@_rule(aten.layer_norm.default)
def _layer_norm(
    writer: Writer,
    node: Node,
    source: Node,
    shape: Sequence[int],
    weight: Node | None = None,
    bias: Node | None = None,
    epsilon: float = 1e-5,
    *_: Any,
) -> Node | None:
    if len(shape) != 1:
        return None
    row = _mean_row(writer, source)
    # The variance of what is centred already: E[x^2] - E[x]^2 would cancel.
    centred = writer.minus(source, writer.call(aten.linear.default, source, row))
    variance = writer.call(aten.linear.default, writer.times(centred, centred), row)
    result = writer.times(centred, writer.call(aten.rsqrt.default, writer.plus(variance, epsilon)))
    result = result if weight is None else writer.times(result, weight)
    return result if bias is None else writer.plus(result, bias)


@_rule(aten.pow.Tensor_Scalar)
def _power(writer: Writer, node: Node, source: Node, exponent: float) -> Node | None:
    if exponent not in (2, 3):
        return None
    square = writer.times(source, source)
    return square if exponent == 2 else writer.times(square, source)


@_rule(aten.gelu.default)
def _gelu(writer: Writer, node: Node, source: Node, *, approximate: str = "none") -> Node | None:
    """XNNPACK computes the exact form whatever the node asks for; the other differs by up to 5e-4."""
    if approximate != "tanh":
        return None
    # 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), the tanh as a sigmoid of twice as much
    cube = writer.times(writer.times(source, source), source)
    inner = writer.plus(source, writer.times(cube, 0.044715))
    gate = writer.call(aten.sigmoid.default, writer.times(inner, 2 * math.sqrt(2 / math.pi)))
    return writer.times(source, gate)


@_rule(aten.cat.default)
def _cat(writer: Writer, node: Node, parts: Sequence[Node], dim: int = 0) -> Node | None:
    """Drop empty parts: partial rotary positions leave some, and XNNPACK takes none."""
    filled = [part for part in parts if part.meta["val"].numel()]
    if len(filled) == len(parts):
        return None
    return filled[0] if len(filled) == 1 else writer.call(aten.cat.default, filled, dim)


@_rule(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.flatten.using_ints)
def _reshape(writer: Writer, node: Node, source: Node, *_: Any, **__: Any) -> Node:
    return writer.reshape(source, node.meta["val"].shape)


@_rule(aten.max.dim)
def _largest(writer: Writer, node: Node, source: Node, dim: int, keepdim: bool = False) -> Node | None:
    """The first of one that is chosen; both have a derivative where it stands."""
    parts = {user.args[1]: user for user in node.users}
    found = writer.call(aten.topk.default, source, 1, dim)
    for index, part in parts.items():
        if not keepdim:
            chosen = writer.reshape(writer.call(operator.getitem, found, index), part.meta["val"].shape)
            part.replace_all_uses_with(chosen)
    return found


@_rule(aten.select.int)
def _select(writer: Writer, node: Node, source: Node, dim: int, index: int) -> Node:
    start = index % source.meta["val"].shape[dim]
    part = writer.call(aten.slice.Tensor, source, dim, start, start + 1)
    return writer.reshape(part, node.meta["val"].shape)


@_rule(operator.getitem)
def _part_of_a_split(writer: Writer, node: Node, split: Node, index: int) -> Node | None:
    if split.target not in _SPLITS:
        return None
    if split.target is aten.unbind.int:
        return _select(writer, node, split.args[0], split.args[1] if len(split.args) > 1 else 0, index)
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    sizes = [part.shape[dim] for part in split.meta["val"]]
    start = sum(sizes[:index])
    return writer.call(aten.slice.Tensor, split.args[0], dim, start, start + sizes[index])


@_rule(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar)
def _with_number(writer: Writer, node: Node, source: Node, number: float) -> Node:
    of_tensors = {"add": aten.add, "sub": aten.sub, "mul": aten.mul, "div": aten.div}
    return writer.call(of_tensors[str(node.target).split(".")[1]].Tensor, source, number)


@_rule(aten.expand_as.default)
def _expand(writer: Writer, node: Node, source: Node, like: Node) -> Node:
    return writer.call(aten.expand.default, source, [*node.meta["val"].shape])


@_rule(aten.hardtanh.default)
def _hard_tanh(writer: Writer, node: Node, source: Node, least: float = -1.0, most: float = 1.0) -> Node:
    return writer.call(aten.clamp.default, source, least, most)


@_rule(aten.clamp_min.default, aten.clamp_max.default)
def _clamp(writer: Writer, node: Node, source: Node, bound: float) -> Node:
    bounds = (bound,) if node.target is aten.clamp_min.default else (None, bound)
    return writer.call(aten.clamp.default, source, *bounds)


@_rule(aten.clamp.Tensor)
def _clamp_by_tensors(
    writer: Writer, node: Node, source: Node, least: Node | None = None, most: Node | None = None
) -> Node:
    bounded = source if least is None else writer.call(aten.maximum.default, source, least)
    return bounded if most is None else writer.call(aten.minimum.default, bounded, most)


@_rule(aten.mm.default)
def _product(writer: Writer, node: Node, left: Node, right: Node) -> Node:
    stacked = [writer.reshape(each, [1, *each.meta["val"].shape]) for each in (left, right)]
    return writer.reshape(writer.call(aten.bmm.default, *stacked), node.meta["val"].shape)


@_rule(aten.linalg_vector_norm.default)
def _length(
    writer: Writer, node: Node, source: Node, order: float = 2, dims: Any = None, keepdim: bool = False
) -> Node | None:
    if order != 2 or not dims:
        return None
    total = writer.call(aten.sum.dim_IntList, writer.times(source, source), dims, keepdim)
    return writer.call(aten.sqrt.default, total)


@_rule(aten.var.correction)
def _variance(
    writer: Writer,
    node: Node,
    source: Node,
    dims: Any = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
) -> Node | None:
    value = source.meta["val"]
    if not dims or [dim % value.dim() for dim in dims] != [value.dim() - 1]:
        return None
    row, width = _mean_row(writer, source), value.shape[-1]
    centred = writer.minus(source, writer.call(aten.linear.default, source, row))
    squares = writer.call(aten.linear.default, writer.times(centred, centred), row)
    return writer.reshape(writer.times(squares, width / (width - correction)), node.meta["val"].shape)


@_rule(aten.multiply.Tensor)
def _multiply(writer: Writer, node: Node, left: Node, right: Node | float) -> Node:
    return writer.times(left, right)


@_rule(aten.stack.default)
def _stack(writer: Writer, node: Node, parts: Sequence[Node], dim: int = 0) -> Node:
    shape = list(node.meta["val"].shape)
    shape[dim] = 1
    return writer.call(aten.cat.default, [writer.reshape(part, shape) for part in parts], dim)


@_rule(aten.slice_scatter.default)
def _slice_scatter(
    writer: Writer,
    node: Node,
    source: Node,
    part: Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Node | None:
    """What stays in front, what is put there, and what stays behind."""
    size = source.meta["val"].shape[dim]
    begin, behind, _ = slice(start, end).indices(size)
    if step != 1:
        return None
    parts = [part]
    if begin > 0:
        parts = [writer.call(aten.slice.Tensor, source, dim, 0, begin), *parts]
    if behind < size:
        parts = [*parts, writer.call(aten.slice.Tensor, source, dim, behind, size)]
    return part if len(parts) == 1 else writer.call(aten.cat.default, parts, dim)


@_rule(aten.matmul.default)
def _matmul(writer: Writer, node: Node, left: Node, right: Node) -> Node | None:
    """Of as many matrices on both sides, of matrices that all rows have, or of a weight."""
    first, second = left.meta["val"].shape, right.meta["val"].shape
    if left.op == "get_attr" and len(first) == 2 < len(second):
        turned = writer.call(aten.transpose.int, right, -2, -1)
        return writer.call(aten.transpose.int, writer.call(aten.linear.default, turned, left), -2, -1)
    if len(first) == len(second) == 4 and second[0] == 1 != first[0] and first[1] == second[1]:
        rows, heads, length, width = first
        by_head = writer.call(aten.permute.default, left, [1, 0, 2, 3])
        stacked = [writer.reshape(by_head, [heads, rows * length, width]), writer.reshape(right, second[1:])]
        product = writer.reshape(writer.call(aten.bmm.default, *stacked), [heads, rows, length, second[-1]])
        return writer.call(aten.permute.default, product, [1, 0, 2, 3])
    if len(first) < 3 or first[:-2] != second[:-2]:
        return None
    stacked = [writer.reshape(each, [-1, *each.meta["val"].shape[-2:]]) for each in (left, right)]
    return writer.reshape(writer.call(aten.bmm.default, *stacked), node.meta["val"].shape)


@_rule(aten.repeat.default)
def _repeat(writer: Writer, node: Node, source: Node, times: Sequence[int]) -> Node | None:
    """In front of all dimensions: what is only multiplied with as many meets them without being repeated."""
    shape, whole = source.meta["val"].shape, node.meta["val"].shape
    in_front = [*times[: len(times) - len(shape)]]
    if any(number != 1 for number in times[len(in_front) :]) or not in_front:
        return None
    others = [other for user in node.users for other in user.all_input_nodes if other is not node]
    if any(user.target is not aten.mul.Tensor for user in node.users) or not others:
        return None
    if any(other.meta["val"].shape[: len(in_front)] != whole[: len(in_front)] for other in others):
        return None
    return writer.reshape(source, [*[1] * len(in_front), *shape])


@_rule(aten.std.dim)
def _deviation(
    writer: Writer,
    node: Node,
    source: Node,
    dims: Sequence[int] | None,
    unbiased: bool = True,
    keepdim: bool = False,
) -> Node | None:
    value = source.meta["val"]
    if unbiased or dims is None or [dim % value.dim() for dim in dims] != [value.dim() - 1]:
        return None
    row = _mean_row(writer, source)
    centred = writer.minus(source, writer.call(aten.linear.default, source, row))
    variance = writer.call(aten.linear.default, writer.times(centred, centred), row)
    return writer.reshape(writer.call(aten.sqrt.default, variance), node.meta["val"].shape)
