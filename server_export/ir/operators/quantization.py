"""Quantization.

Rounding has no derivative: every tangent of a token is rounded like the token's value, with its own scale
and zero point.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
from torch.fx import Node

from server_export.ir.operators.table import Category, row
from server_export.ir.tangents import Dual, GraphTangents
from server_export.ir.writer import GraphWriter

quantized = torch.ops.quantized_decomposed


def _choose_jvp(
    t: GraphTangents, node: Node, source: Dual, mapping: str, block: list[int], *rest: Any, **named: Any
) -> tuple[Dual, ...]:
    chosen = [
        t.call(node.target, part, mapping, [1, *block], *rest, **named)
        for part in (source.primal, source.tangents)
    ]
    return tuple(Dual(t, *(t.call(operator.getitem, each, index) for each in chosen)) for index in range(2))


def _round_jvp(
    t: GraphTangents, node: Node, source: Dual, block: list[int], scale: Dual, zero: Dual, *rest: Any
) -> Dual:
    parts = (
        t.call(node.target, part, [1, *block], scales, zeros, *rest)
        for part, scales, zeros in (
            (source.primal, scale.primal, zero.primal),
            (source.tangents, scale.tangents, zero.tangents),
        )
    )
    return Dual(t, *parts)


def _round_by_row(writer: GraphWriter, node: Node, codes: Node, *_: Any) -> Node | None:
    """Write dynamic quantization of activations in ExecuTorch's per-token operators.

    Tracing decomposes torchao's operators at every occurrence, which took a quarter of the time of an export.
    """
    if str(codes.target) != "torchao.quantize_affine.default":
        return None
    limits = (-128, 127, torch.int8)
    source = codes.args[0]
    chosen = writer.call(quantized.choose_qparams_per_token_asymmetric.default, source, torch.int8)
    parameters = [writer.call(operator.getitem, chosen, index) for index in range(2)]
    rounded = writer.call(quantized.quantize_per_token.default, source, *parameters, *limits)
    return writer.call(quantized.dequantize_per_token.default, rounded, *parameters, *limits, torch.float32)


row("torchao.choose_qparams_affine.default", category=Category.QUANTIZE, jvp=_choose_jvp)
row("torchao.quantize_affine.default", category=Category.QUANTIZE, jvp=_round_jvp)
row("torchao.dequantize_affine.default", category=Category.QUANTIZE, jvp=_round_jvp, core=_round_by_row)
