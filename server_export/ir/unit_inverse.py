"""The inverse of unit lower triangular matrices, as one operator of a graph.

    unit_inverse(below f32 [batch, n, n], one [1, n, n], halves [[1, n, n], ...]) -> [batch, n, n]

It computes (1 + below)^-1, where `below` is 0 on and above the diagonal. A block matrix has the inverse

    [ P    ]^-1   [  P^-1              ]
    [ Q  R ]    = [ -R^-1 Q P^-1  R^-1 ]

so blocks of 1, 2, 4, ... rows are inverted by matrix products alone; `halves` masks Q for 1, 2, 4, ... in
turn. A sum of powers of `below` would consist of products too, but its terms grow far beyond the result. A
graph keeps the operator whole, because its derivatives are two products with the inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from server_export.ir.operators import Category, row
from server_export.ir.operators.products import product_jvp
from server_export.ir.tangents import Dual, GraphTangents
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten

torch.library.define("prge::unit_inverse", "(Tensor below, Tensor one, Tensor[] halves) -> Tensor")


def by_products(below: torch.Tensor, one: torch.Tensor, halves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the inverse with PyTorch operators."""
    inverse = one - below * halves[0]
    for half in halves[1:]:
        inverse = inverse - torch.bmm(torch.bmm(inverse, below * half), inverse)
    return inverse


torch.library.impl("prge::unit_inverse", "CompositeImplicitAutograd")(by_products)
UNIT_INVERSE = torch.ops.prge.unit_inverse.default


class UnitInverse(torch.autograd.Function):
    """The operator with a backward pass of two products with the inverse."""

    @staticmethod
    def forward(ctx: Any, below: torch.Tensor, one: torch.Tensor, halves: Sequence[torch.Tensor]) -> Any:
        """Return the inverse [batch, n, n]."""
        inverse = by_products(below, one, halves)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Return the gradient of `below` from grad_output [batch, n, n], by d(X) = -X d(below) X."""
        (inverse,) = ctx.saved_tensors
        inverse_transposed = inverse.transpose(1, 2)
        return -torch.bmm(torch.bmm(inverse_transposed, grad_output), inverse_transposed), None, None


def _jvp(t: GraphTangents, node: Node, below: Dual, *tables: Any) -> Dual:
    """Write d(X) = -X d(below) X."""
    inverse = t.call(node.target, below.value, *tables)
    product = product_jvp(t, product_jvp(t, inverse, below), inverse)
    return Dual(t, t.as_primal(inverse), t.negative(product.tangents))


def _in_core(writer: GraphWriter, node: Node, below: Node, one: Node, halves: list[Node]) -> Node:
    """Invert blocks of 1, 2, 4, ... rows, each size from the one before; of a single row the inverse is 1."""
    inverse = writer.minus(one, writer.times(below, halves[0]))
    for half in halves[1:]:
        product = writer.call(aten.bmm.default, inverse, writer.times(below, half))
        inverse = writer.minus(inverse, writer.call(aten.bmm.default, product, inverse))
    return inverse


row(UNIT_INVERSE, category=Category.FUSED, jvp=_jvp, core=_in_core, autograd=UnitInverse.apply)
