"""Operators of a graph as ExecuTorch lowers them, so that it has none to take apart.

What changes the order of numbers writes them anew: shapes of unknown sizes are then all there is to know of a
value, and a reshape needs no copy of its own.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
from torch.fx import GraphModule, Node

from server_export.ir.mixed_parts import MIXED_PARTS
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.ir.unit_inverse import UNIT_INVERSE
from server_export.ir.writer import Rule, Writer, apply_rules, registrar

aten = torch.ops.aten
quantized = torch.ops.quantized_decomposed

RULES: dict[str, Rule] = {}
_rule = registrar(RULES)


def write_core_operators(graph_module: GraphModule) -> None:
    """Write a graph in core operators, in place; its nodes carry `meta["val"]`."""
    apply_rules(graph_module, RULES)
    graph_module.recompile()


@_rule(aten.transpose.int)
def _transpose(writer: Writer, node: Node, source: Node, first: int, second: int) -> Node:
    order = list(range(source.meta["val"].dim()))
    order[first], order[second] = order[second], order[first]
    return writer.call(aten.permute_copy.default, source, order)


@_rule(aten.t.default)
def _matrix_transpose(writer: Writer, node: Node, source: Node) -> Node:
    return writer.call(aten.permute_copy.default, source, [1, 0])


@_rule(aten.permute.default)
def _permute(writer: Writer, node: Node, source: Node, order: list[int]) -> Node:
    return writer.call(aten.permute_copy.default, source, order)


@_rule(aten.expand.default)
def _expand(writer: Writer, node: Node, source: Node, shape: list[int], **_: Any) -> Node:
    return writer.call(aten.expand_copy.default, source, shape)


@_rule(aten.slice.Tensor)
def _slice(writer: Writer, node: Node, source: Node, *bounds: Any) -> Node:
    return writer.call(aten.slice_copy.Tensor, source, *bounds)


@_rule(aten.softmax.int)
def _softmax(writer: Writer, node: Node, source: Node, dim: int, *_: Any) -> Node:
    return writer.call(aten._softmax.default, source, dim, False)


@_rule(aten.silu.default)
def _silu(writer: Writer, node: Node, source: Node) -> Node:
    return writer.times(source, writer.call(aten.sigmoid.default, source))


@_rule(aten.softplus.default)
def _softplus(writer: Writer, node: Node, source: Node) -> Node:
    """log(1 + exp(x)), whatever the size of x."""
    small = writer.call(aten.exp.default, writer.times(writer.call(aten.abs.default, source), -1.0))
    rest = writer.call(aten.log.default, writer.plus(small, 1.0))
    return writer.plus(writer.call(aten.relu.default, source), rest)


@_rule(aten.rsub.Scalar)
def _reversed_difference(writer: Writer, node: Node, source: Node, other: float, *_: Any) -> Node:
    return writer.plus(writer.times(source, -1.0), other)


@_rule(SOFTMAX_PARTS)
def _softmax_parts(writer: Writer, node: Node, logits: Node, shift: Node, index: Node) -> Node:
    """The shift is taken from what was chosen once more: there are far fewer of these than of all."""
    total = writer.total(writer.call(aten.exp.default, writer.minus(logits, shift)))
    chosen = writer.minus(writer.call(aten.gather.default, logits, -1, index), shift)
    return writer.call(aten.cat.default, [chosen, total], -1)


@_rule(aten.logsumexp.default)
def _log_total(writer: Writer, node: Node, source: Node, dims: list[int], keeps: bool = False) -> Node:
    largest = writer.call(aten.amax.default, source, dims, True)
    exponentials = writer.call(aten.exp.default, writer.minus(source, largest))
    total = writer.call(aten.sum.dim_IntList, exponentials, dims, True)
    found = writer.plus(writer.call(aten.log.default, total), largest)
    return found if keeps else writer.reshape(found, node.meta["val"].shape)


@_rule(MIXED_PARTS)
def _mixed_parts(
    writer: Writer, node: Node, before: Node, within: Node, past_values: Node, values: Node
) -> Node:
    scores = writer.call(aten.cat.default, [before, within], -1)
    weights = writer.call(aten._softmax.default, scores, -1, False)
    return writer.call(aten.bmm.default, weights, writer.call(aten.cat.default, [past_values, values], 1))


@_rule(UNIT_INVERSE)
def _unit_inverse(writer: Writer, node: Node, below: Node, one: Node, halves: list[Node]) -> Node:
    """Blocks of 1, 2, 4, ... rows, those of each in turn by the one before; with one row all are 1."""
    inverse = writer.minus(one, writer.times(below, halves[0]))
    for half in halves[1:]:
        product = writer.call(aten.bmm.default, inverse, writer.times(below, half))
        inverse = writer.minus(inverse, writer.call(aten.bmm.default, product, inverse))
    return inverse


@_rule("torchao.dequantize_affine.default")
def _rounded_activation(writer: Writer, node: Node, codes: Node, *_: Any) -> Node | None:
    """Of an activation, row by row. A trace takes torchao's own operators apart each time that it meets one,
    which was a quarter of an export."""
    if str(codes.target) != "torchao.quantize_affine.default":
        return None
    limits = (-128, 127, torch.int8)
    source = codes.args[0]
    chosen = writer.call(quantized.choose_qparams_per_token_asymmetric.default, source, torch.int8)
    parameters = [writer.call(operator.getitem, chosen, index) for index in range(2)]
    rounded = writer.call(quantized.quantize_per_token.default, source, *parameters, *limits)
    return writer.call(quantized.dequantize_per_token.default, rounded, *parameters, *limits, torch.float32)
