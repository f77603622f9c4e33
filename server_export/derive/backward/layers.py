"""Frozen linear layers as one operator each, so that autograd can go through them and the graph keeps them.

    y = layer(x)        forward: the layer as it was traced, quantized activations and all
    dx = layer^T(dy)    backward: a layer with the transposed weight

Traced as they are, a linear layer falls into products and transpositions, and quantization has no derivative
at all. Here rounding has the derivative 1 (the straight-through estimator: Bengio et al., arXiv 1308.3432),
and the backward pass is one more quantized layer, whose weight is the forward one's, transposed and quantized
once more. It has int8 weights whatever the forward one has: rounded to int4 a second time, they took the
gradient of 8 layers from a cosine of 0.9995 with the true one to 0.976.

The gradient by the logits of a vocabulary is one large number, of the target, among many small ones: the
probabilities of all other tokens, most of which int8 rounds to 0. What is lost adds up over positions. So
these rows go through the transposed head twice, as what int8 can hold and as the small rest: on
SmolLM2-135M the cosine with the true gradient is 0.98 instead of 0.5.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from server_export.ir.modules import get_attribute
from server_export.ir.shapes import to_meta
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.ir.writer import GraphWriter
from server_export.quantize.quantization import int8_weight

aten = torch.ops.aten

# What the names of constants begin with that the way back alone needs.
TRANSPOSED = "transposed_"

_QUANTIZED = "torchao.dequantize_affine.default"
# Of the sum of a row's absolute values, two of which are about the target's: below half a step of int8.
_SMALL = 1 / 1024
# A row of zeros has this limit; from the limit on, values are large within a ten-thousandth.
_TINY, _STEEP = 1e-30, 1e4


@torch.library.custom_op("prge::frozen_layer", mutates_args=())
def frozen_layer(
    x: torch.Tensor, layer: int, width_in: int, width_out: int, transposed: bool
) -> torch.Tensor:
    """x [..., in] -> [..., out] by the layer of that number; traced, never run."""
    raise NotImplementedError("a frozen layer is traced and replaced, never run")


@frozen_layer.register_fake
def _(x: torch.Tensor, layer: int, width_in: int, width_out: int, transposed: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], width_in if transposed else width_out))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.layer, ctx.widths = inputs[1], inputs[2:4]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return frozen_layer(gradient, ctx.layer, *ctx.widths, True), None, None, None, None


frozen_layer.register_autograd(_backward, setup_context=_keep)

FROZEN = torch.ops.prge.frozen_layer.default


@dataclass(frozen=True)
class FrozenLayer:
    """A frozen layer of a graph.

    `weight` is the get_attr node of a float weight, or the node that dequantizes integer codes; `scales` the
    node that chooses the activations' scales, None in a float layer. `is_head` tells whether its outputs are
    logits of a vocabulary.
    """

    weight: Node
    bias: Node | None
    scales: Node | None
    is_head: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """In and out."""
        width_out, width_in = self.weight.meta["val"].shape
        return int(width_in), int(width_out)


def replace_layers(graph_module: GraphModule) -> list[FrozenLayer]:
    """Make one operator of every linear layer with a constant weight, in place; numbered in order."""
    graph, layers, writer = graph_module.graph, list[FrozenLayer](), GraphWriter(graph_module)
    is_head = any(node.target is SOFTMAX_PARTS for node in graph.nodes)
    for node in list(graph.nodes):
        if node.target is not aten.linear.default:
            continue
        source, weight, *rest = node.args
        layer = _frozen(source, weight, rest[0] if rest else None)
        if layer is None:
            continue
        layer = replace(layer, is_head=is_head)
        if layer.scales is not None:
            source = layer.scales.args[0]
        writer.replace(node, GraphWriter.call, FROZEN, source, len(layers), *layer.widths, False)
        layers.append(layer)
    # The chains stay in the graph: what is expanded is copied from them.
    return layers


def _frozen(source: Node, weight: Node, bias: Node | None) -> FrozenLayer | None:
    """The layer of a linear operator's arguments; None if its weight isn't constant."""
    if weight.op == "get_attr":
        return FrozenLayer(weight, bias, None)
    if str(weight.target) == _QUANTIZED and str(source.target) == _QUANTIZED:
        codes = source.args[0]
        return FrozenLayer(weight, bias, codes.args[2].args[0])
    return None


class Expansion:
    """Writes the layers into a graph again, forwards and backwards.

    Args:
        root: the module that `replace_layers` was given; it gets the transposed weights.
        graph: to write, of the same constants.
        layers: as `replace_layers` numbered them.
        copy: the node in `graph` of a constant of the root's own graph.
    """

    def __init__(
        self, root: GraphModule, graph: Graph, layers: list[FrozenLayer], copy: Callable[[Node], Node]
    ) -> None:
        self.root = root
        self.graph = graph
        self.layers = layers
        self._writer = GraphWriter(root, graph=graph)
        self._copy = copy

    def write(self, node: Node) -> Node:
        """What takes the place of one frozen layer, written before it."""
        source, number, _, _, transposed = node.args
        layer = self.layers[number]
        with self.graph.inserting_before(node):
            if transposed:
                return self._backward(source, layer)
            if layer.scales is None:
                weight = self._constant_of(layer.weight)
            else:
                source = self._rounded(source, layer.scales)
                weight = self._dequantized(layer.weight, *map(self._constant_of, _tensors(layer.weight)))
            bias = () if layer.bias is None else (self._constant_of(layer.bias),)
            return self._writer.call(aten.linear.default, source, weight, *bias)

    def _backward(self, source: Node, layer: FrozenLayer) -> Node:
        writer = self._writer
        if layer.scales is None:
            weight = _transposed(get_attribute(self.root, str(layer.weight.target)).detach())
            name, *_ = transposed_names(str(layer.weight.target))
            # A row spreads one number over itself.
            product = aten.mul.Tensor if weight.dim() == 1 else aten.linear.default
            return writer.call(product, source, self._constant(name, weight))
        parts = [str(node.target) for node in _tensors(layer.weight)]
        backward = transposed_codes(*(get_attribute(self.root, part) for part in parts))
        names = transposed_names(parts[0])
        codes, *scales = (self._constant(name, tensor) for name, tensor in zip(names, backward, strict=True))
        rows = source.meta["val"].shape[-2]
        if layer.is_head:
            source = self._large_and_small(source)
        rounded = self._rounded(source, layer.scales)
        block = [1, layer.widths[1]]
        restore = torch.ops.torchao.dequantize_affine.default
        weight = writer.call(restore, codes, block, *scales, torch.int8, -128, 127)
        result = writer.call(aten.linear.default, rounded, weight)
        if not layer.is_head:
            return result
        parts_of_rows = (
            writer.call(aten.slice.Tensor, result, -2, start, start + rows) for start in (0, rows)
        )
        return writer.plus(*parts_of_rows)

    def _large_and_small(self, source: Node) -> Node:
        """Rows [..., n, words] as [..., 2 n, words]: values above a limit, and then the others.

        Which is which is written as arithmetic: XNNPACK has no comparison.
        """
        writer = self._writer
        sizes = writer.call(aten.abs.default, source)
        total = writer.call(aten.sum.dim_IntList, sizes, [-1], True)
        limit = writer.plus(writer.times(total, _SMALL), _TINY)
        steep = writer.times(writer.minus(writer.times(sizes, writer.reciprocal(limit)), 1.0), _STEEP)
        large = writer.times(source, writer.call(aten.clamp.default, steep, 0.0, 1.0))
        return writer.call(aten.cat.default, [large, writer.minus(source, large)], -2)

    def _rounded(self, source: Node, like: Node) -> Node:
        """Activations quantized row by row and back, as another layer does it."""
        block = [*(1 for _ in source.meta["val"].shape[:-1]), int(source.meta["val"].shape[-1])]
        ops, call = torch.ops.torchao, self._writer.call
        _, mapping, _, *rest = like.args
        chosen = call(ops.choose_qparams_affine.default, source, mapping, block, *rest)
        parameters = [call(operator.getitem, chosen, index) for index in range(2)]
        limits = (rest[0], *rest[1:3])
        codes = call(ops.quantize_affine.default, source, block, *parameters, *limits)
        return call(ops.dequantize_affine.default, codes, block, *parameters, *limits)

    def _dequantized(self, weight: Node, codes: Node, scale: Node, zero: Node) -> Node:
        _, block, _, _, *range_of_codes = weight.args
        return self._writer.call(weight.target, codes, block, scale, zero, *range_of_codes)

    def _constant_of(self, node: Node) -> Node:
        """The copy of a constant."""
        copy = self._copy(node)
        copy.meta.setdefault("val", to_meta(node.meta["val"]))
        return copy

    def _constant(self, name: str, tensor: torch.Tensor) -> Node:
        if not hasattr(self.root, name):
            self.root.register_buffer(name, tensor)
        return self._writer.attribute(name, tensor)


def add_transposed_weights(
    tensors: Mapping[str, torch.Tensor], names: Collection[str]
) -> dict[str, torch.Tensor]:
    """A block's constants, with those among `names` that its way back has of its layers."""
    made = dict(tensors)
    for name, tensor in tensors.items():
        backward = transposed_names(name)
        if backward[0] not in names:
            continue
        if backward[1] in names:
            parts = (name.removesuffix("_codes") + part for part in ("_codes", "_scale", "_zero_point"))
            made |= zip(backward, transposed_codes(*(tensors[part] for part in parts)), strict=True)
        else:
            made[backward[0]] = _transposed(tensor)
    return made


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    """A float weight [out, in] of the way back, [in, out] or, with one output, [in].

    It is stored a second time: XNNPACK would pack what a product reads as it is at every call, and reads
    memory that is gone where a layer's weight is a factor too.
    """
    return weight[0].clone() if len(weight) == 1 else weight.t().contiguous()


def transposed_names(weight: str) -> tuple[str, str, str]:
    """Names of a weight's constants on the way back: itself or its codes, and of codes the scales and zero
    points."""
    name = TRANSPOSED + weight.replace(".", "_")
    return name, f"{name}_scale", f"{name}_zero_point"


def transposed_codes(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes i8 [in, out], scales and zero points [in, 1] of a quantized weight's way back.

    Args:
        codes: i8 [out, in], of int8 or int4.
        scale, zero_point: [out, groups].
    """
    block = [1, codes.shape[1] // scale.shape[1]]
    # Its range isn't looked at when codes become floats.
    weight = torch.ops.torchao.dequantize_affine.default(
        codes, block, scale, zero_point, torch.int8, -128, 127
    )
    backward = int8_weight(weight.float().t().contiguous())
    return backward.qdata.detach(), backward.scale.detach(), backward.zero_point.detach()


def _tensors(weight: Node) -> tuple[Node, Node, Node]:
    """Codes, scales and zero points of a quantized weight."""
    codes, _, scale, zero, *_ = weight.args
    return codes, scale, zero
