"""What memory is planned for: the largest sizes of a call.

XNNPACK's workspace is at least as large as the sizes in its program say, all of it touched, and grows with a
call. So its program has the example's sizes, and these bounds are ExecuTorch's alone: pages of an arena that
no call reaches take nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from executorch.exir.pass_base import PassBase, PassResult
from executorch.exir.tensor import TensorSpec
from torch.fx import GraphModule

from server_export.lower.sizes import Size


def largest_shapes(sizes: Iterable[Size]) -> PassBase:
    """The pass that gives values of a call's sizes the shapes of the largest call.

    Raises:
        ValueError: two sizes of other maxima have the same example, by which they are told apart.
    """
    maxima = {(size.example, size.maximum) for size in sizes}
    if len(dict(maxima)) < len(maxima):
        raise ValueError(f"two sizes have the same example: {sorted(maxima)}")
    return _LargestShapes(dict(maxima))


class _LargestShapes(PassBase):
    def __init__(self, maximum: Mapping[int, int]) -> None:
        super().__init__()
        self._maximum = maximum

    def call(self, graph_module: GraphModule) -> PassResult:
        """Write the shapes into the specs of all values."""
        symbols = {
            size.node.expr: self._maximum[int(size.node.hint)]
            for node in graph_module.graph.find_nodes(op="placeholder")
            for size in node.meta["val"].shape
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol
        }

        def largest(number: Any) -> int:
            return int(number.node.expr.subs(symbols)) if isinstance(number, torch.SymInt) else int(number)

        for node in graph_module.graph.nodes:
            for spec in pytree.tree_leaves(node.meta.get("spec", [])):
                if isinstance(spec, TensorSpec):
                    spec.shape = [largest(number) for number in spec.shape]
                    spec.stride = tuple(largest(number) for number in spec.stride)
        return PassResult(graph_module, True)
