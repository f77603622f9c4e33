"""Products with a matrix of the adapter, whose tangents are rank-one and never materialized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from server_export.ir.tangents import Dual, GraphTangents

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class RankOneMatrix:
    """An adapter matrix [1, above, out] whose tangent for a query and row is the outer product u v^T.

    Attributes:
        primal: the matrix.
        u: [queries, rows, above].
        v: [queries, rows, out].
    """

    primal: Node
    u: Node
    v: Node
    rows: int
    above: int
    out: int


def apply_to_rank_one(t: GraphTangents, node: Node, *arguments: Any) -> Dual | RankOneMatrix:
    """Apply an operator that has adapter matrices among its arguments.

    Raises:
        NotImplementedError: the operator is neither a transposition of such a matrix nor a product with one.
    """
    if node.target is aten.transpose.int and isinstance(arguments[0], RankOneMatrix):
        matrix = arguments[0]
        primal = t.call(aten.transpose.int, matrix.primal, 1, 2)
        return RankOneMatrix(primal, matrix.v, matrix.u, matrix.rows, matrix.out, matrix.above)
    if node.target is aten.bmm.default and not isinstance(arguments[0], RankOneMatrix):
        return _product_jvp(t, *arguments)
    raise NotImplementedError(f"{node.target} has no rule for a matrix of the adapter")


def _product_jvp(t: GraphTangents, left: Any, right: RankOneMatrix) -> Dual:
    """Return left right and its tangents d(left) right + left u v^T, of [1, rows x length, above]."""
    value = left.value if isinstance(left, Dual) else left
    primal = t.as_primal(t.call(aten.bmm.default, value, right.primal))
    tangents = (_jvp_to_rank if right.above > right.out else _jvp_from_rank)(t, left, value, right)
    return Dual(t, primal, t.reshape(tangents, [t.queries, *primal.meta["val"].shape[1:]]))


def _jvp_from_rank(t: GraphTangents, left: Any, value: Node, right: RankOneMatrix) -> Node:
    """Multiply with a matrix of few rows: one number per token and query, the sum of left u over the rank."""
    queries, rows, rank, out = t.queries, right.rows, right.above, right.out
    length = value.meta["val"].shape[1] // rows
    u = t.reshape(right.u, [queries, rows, 1, rank])
    projected = t.total(t.times(t.reshape(value, [rows, length, rank]), u))
    v = t.reshape(right.v, [queries, rows, 1, out])
    if not isinstance(left, Dual):
        return t.times(projected, v)
    # [left, projected] [lora_b; v] for every query and row, because a sum of two outputs would pass over
    # memory again.
    count = queries * rows
    parts = t.reshape(left.tangents, [count, length, rank]), t.reshape(projected, [count, length, 1])
    v = t.call(aten.constant_pad_nd.default, v, [0, 0, rank, 0, 0, 0, 0, 0], 0.0)
    lora_b = t.call(aten.constant_pad_nd.default, t.reshape(right.primal, [rank, out]), [0, 0, 0, 1], 0.0)
    matrices = t.reshape(t.plus(v, lora_b), [count, rank + 1, out])
    return t.call(aten.bmm.default, t.call(aten.cat.default, [*parts], 2), matrices)


def _jvp_to_rank(t: GraphTangents, left: Any, value: Node, right: RankOneMatrix) -> Node:
    """Multiply with a matrix of few columns, without a copy of it for each query."""
    queries, rows, above, out = t.queries, right.rows, right.above, right.out
    tokens = value.meta["val"].shape[1]
    length = tokens // rows
    # One product computes left u for all queries of a row.
    u = t.call(aten.permute.default, right.u, [1, 2, 0])
    projected = t.call(aten.bmm.default, t.reshape(value, [rows, length, above]), u)
    projected = t.call(aten.permute.default, projected, [2, 0, 1])
    projected = t.reshape(projected, [queries, rows, length, 1])
    tangents = t.times(projected, t.reshape(right.v, [queries, rows, 1, out]))
    if not isinstance(left, Dual):
        return tangents
    tangents = t.reshape(tangents, [queries, 1, tokens, out])
    left_tangents = t.reshape(left.tangents, [1, queries * tokens, above])
    product = t.call(aten.bmm.default, left_tangents, right.primal)
    return t.plus(t.reshape(product, [queries, 1, tokens, out]), tangents)
