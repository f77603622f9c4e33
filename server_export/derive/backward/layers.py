"""Frozen linear layers as one operator each, which autograd differentiates and a graph keeps whole.

    y = layer(x)        forward: the layer as it was traced, including quantized activations
    dx = layer^T(dy)    backward: a layer with the transposed weight

Otherwise tracing decomposes a linear layer into products and transpositions, and quantization has no
derivative. Here rounding has the derivative 1 (straight-through estimator: Bengio et al., arXiv 1308.3432),
and the backward pass is another quantized layer, whose weight is the forward weight, transposed and quantized
again. It is int8 whatever the forward weight is: with int4, the cosine of the gradient of 8 layers with the
true one fell from 0.9995 to 0.976.

The gradient of the logits is one large number, for the target, among many small ones: the probabilities of
all other tokens, most of which int8 rounds to 0, and these errors add up over positions. Therefore these rows
pass through the transposed head twice, once with the values that int8 can represent and once with the small
rest. On SmolLM2-135M the cosine with the true gradient is 0.98 instead of 0.5.
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

# Prefix of the names of constants that only the backward pass uses.
TRANSPOSED = "transposed_"

_QUANTIZED = "torchao.dequantize_affine.default"
# Relative to the sum of a row's absolute values, of which the target has about half: below half a step of
# int8.
_SMALL = 1 / 1024
# Threshold for a row of zeros; steepness of the soft step at the threshold.
_TINY, _STEEP = 1e-30, 1e4


@torch.library.custom_op("prge::frozen_layer", mutates_args=())
def frozen_layer(
    x: torch.Tensor, layer: int, width_in: int, width_out: int, transposed: bool
) -> torch.Tensor:
    """Apply the layer with this number: x [..., in] -> [..., out]; the operator is traced and never run."""
    raise NotImplementedError("A frozen layer is traced and replaced; the operator is never run.")


@frozen_layer.register_fake
def _(x: torch.Tensor, layer: int, width_in: int, width_out: int, transposed: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], width_in if transposed else width_out))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.layer, ctx.widths = inputs[1], inputs[2:4]


def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
    return frozen_layer(grad_output, ctx.layer, *ctx.widths, True), None, None, None, None


frozen_layer.register_autograd(_backward, setup_context=_setup_context)

FROZEN = torch.ops.prge.frozen_layer.default


@dataclass(frozen=True)
class FrozenLayer:
    """A frozen linear layer of a graph.

    Attributes:
        weight: the get_attr node of a float weight, or the node that dequantizes integer codes.
        bias: the node of the bias, or None.
        scales: the node that computes the scales of quantized activations; None for a float layer.
        is_head: whether the outputs are logits of a vocabulary.
    """

    weight: Node
    bias: Node | None
    scales: Node | None
    is_head: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """Input and output width."""
        width_out, width_in = self.weight.meta["val"].shape
        return int(width_in), int(width_out)


def replace_layers(graph_module: GraphModule) -> list[FrozenLayer]:
    """Replace linear layers with a constant weight by one operator each, in place; return the layers."""
    graph, layers, writer = graph_module.graph, list[FrozenLayer](), GraphWriter(graph_module)
    is_head = any(node.target is SOFTMAX_PARTS for node in graph.nodes)
    for node in list(graph.nodes):
        if node.target is not aten.linear.default:
            continue
        source, weight, *rest = node.args
        layer = _match_layer(source, weight, rest[0] if rest else None)
        if layer is None:
            continue
        layer = replace(layer, is_head=is_head)
        if layer.scales is not None:
            source = layer.scales.args[0]
        writer.replace(node, GraphWriter.call, FROZEN, source, len(layers), *layer.widths, False)
        layers.append(layer)
    # The original nodes stay in the graph, because the expansion copies them.
    return layers


def _match_layer(source: Node, weight: Node, bias: Node | None) -> FrozenLayer | None:
    """Return the layer with these arguments of a linear operator, or None if the weight isn't constant."""
    if weight.op == "get_attr":
        return FrozenLayer(weight, bias, None)
    if str(weight.target) == _QUANTIZED and str(source.target) == _QUANTIZED:
        codes = source.args[0]
        return FrozenLayer(weight, bias, codes.args[2].args[0])
    return None


class Expansion:
    """Writes frozen layers back into a graph, in the forward and in the backward direction.

    Args:
        root: the module that `replace_layers` modified; it stores the transposed weights.
        graph: the graph to write to, with the same constants.
        layers: the layers by number.
        copy: returns the node in `graph` for a constant of the root's own graph.
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
        """Write the operators of a frozen layer before its node, and return their output."""
        source, number, _, _, transposed = node.args
        layer = self.layers[number]
        with self.graph.inserting_before(node):
            if transposed:
                return self._backward(source, layer)
            if layer.scales is None:
                weight = self._copied_constant(layer.weight)
            else:
                source = self._rounded(source, layer.scales)
                weight = self._dequantized(layer.weight, *map(self._copied_constant, _tensors(layer.weight)))
            bias = () if layer.bias is None else (self._copied_constant(layer.bias),)
            return self._writer.call(aten.linear.default, source, weight, *bias)

    def _backward(self, source: Node, layer: FrozenLayer) -> Node:
        writer = self._writer
        if layer.scales is None:
            weight = _transposed(get_attribute(self.root, str(layer.weight.target)).detach())
            name, *_ = transposed_names(str(layer.weight.target))
            # With a single output, the product is a multiplication with a row.
            product = aten.mul.Tensor if weight.dim() == 1 else aten.linear.default
            return writer.call(product, source, self._constant(name, weight))
        part_names = [str(node.target) for node in _tensors(layer.weight)]
        backward = transposed_codes(*(get_attribute(self.root, part) for part in part_names))
        names = transposed_names(part_names[0])
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
        halves = (writer.call(aten.slice.Tensor, result, -2, start, start + rows) for start in (0, rows))
        return writer.plus(*halves)

    def _large_and_small(self, source: Node) -> Node:
        """Split rows [..., n, vocabulary] into large and small values, stacked to [..., 2 n, vocabulary].

        The selection is written as arithmetic, because XNNPACK has no comparison.
        """
        writer = self._writer
        magnitudes = writer.call(aten.abs.default, source)
        total = writer.call(aten.sum.dim_IntList, magnitudes, [-1], True)
        threshold = writer.plus(writer.times(total, _SMALL), _TINY)
        soft_step = writer.times(
            writer.minus(writer.times(magnitudes, writer.reciprocal(threshold)), 1.0), _STEEP
        )
        large = writer.times(source, writer.call(aten.clamp.default, soft_step, 0.0, 1.0))
        return writer.call(aten.cat.default, [large, writer.minus(source, large)], -2)

    def _rounded(self, source: Node, like: Node) -> Node:
        """Quantize and dequantize activations per row, with the settings of another layer."""
        block = [*(1 for _ in source.meta["val"].shape[:-1]), int(source.meta["val"].shape[-1])]
        ops, call = torch.ops.torchao, self._writer.call
        _, mapping, _, *rest = like.args
        scale_and_zero_point = call(ops.choose_qparams_affine.default, source, mapping, block, *rest)
        parameters = [call(operator.getitem, scale_and_zero_point, index) for index in range(2)]
        limits = (rest[0], *rest[1:3])
        codes = call(ops.quantize_affine.default, source, block, *parameters, *limits)
        return call(ops.dequantize_affine.default, codes, block, *parameters, *limits)

    def _dequantized(self, weight: Node, codes: Node, scale: Node, zero: Node) -> Node:
        _, block, _, _, *range_of_codes = weight.args
        return self._writer.call(weight.target, codes, block, scale, zero, *range_of_codes)

    def _copied_constant(self, node: Node) -> Node:
        """Return the copy of a constant's node."""
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
    """Return a block's constants with those of its transposed weights that are among `names`."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        backward = transposed_names(name)
        if backward[0] not in names:
            continue
        if backward[1] in names:
            parts = (name.removesuffix("_codes") + part for part in ("_codes", "_scale", "_zero_point"))
            result |= zip(backward, transposed_codes(*(tensors[part] for part in parts)), strict=True)
        else:
            result[backward[0]] = _transposed(tensor)
    return result


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    """Return a float weight [out, in] of the backward pass: [in, out], or [in] for a single output.

    It is stored a second time: XNNPACK would pack an untransposed weight at every call, and reads memory that
    has been freed if the weight of a layer is also an operand of a product.
    """
    return weight[0].clone() if len(weight) == 1 else weight.t().contiguous()


def transposed_names(weight: str) -> tuple[str, str, str]:
    """Return names of a weight's constants in the backward pass: weight or codes, scales, zero points."""
    name = TRANSPOSED + weight.replace(".", "_")
    return name, f"{name}_scale", f"{name}_zero_point"


def transposed_codes(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes i8 [in, out], scales and zero points [in, 1] of a transposed quantized weight.

    Args:
        codes: i8 [out, in], of int8 or int4.
        scale, zero_point: [out, groups].
    """
    block = [1, codes.shape[1] // scale.shape[1]]
    # Dequantization ignores the range of the codes.
    weight = torch.ops.torchao.dequantize_affine.default(
        codes, block, scale, zero_point, torch.int8, -128, 127
    )
    backward = int8_weight(weight.float().t().contiguous())
    return backward.qdata.detach(), backward.scale.detach(), backward.zero_point.detach()


def _tensors(weight: Node) -> tuple[Node, Node, Node]:
    """Return the nodes of the codes, scales and zero points of a quantized weight."""
    codes, _, scale, zero, *_ = weight.args
    return codes, scale, zero
