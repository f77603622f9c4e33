"""Plan ExecuTorch's memory for the largest sizes of a call.

XNNPACK allocates and touches a workspace for the sizes in its program, and enlarges it for a larger call. So
XNNPACK's program has the example's sizes, and only ExecuTorch plans for the largest: pages of its arena that
no call uses take no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.utils._pytree as pytree
from executorch.exir.pass_base import PassBase, PassResult
from executorch.exir.tensor import TensorSpec
from torch.fx import GraphModule

from server_export.lower.sizes import Size, largest_of, maxima_of


def largest_shapes(sizes: Iterable[Size]) -> PassBase:
    """Return a pass that replaces dynamic sizes in the shapes of all values by their maxima.

    Raises:
        ValueError: two sizes with different maxima have the same example, which identifies a size.
    """
    return _LargestShapes(maxima_of(sizes))


class _LargestShapes(PassBase):
    def __init__(self, maxima: Mapping[int, int]) -> None:
        super().__init__()
        self._maxima = maxima

    def call(self, graph_module: GraphModule) -> PassResult:
        """Write the largest shapes into the specs of all values."""
        largest = largest_of(graph_module.graph, self._maxima)
        for node in graph_module.graph.nodes:
            for spec in pytree.tree_leaves(node.meta.get("spec", [])):
                if isinstance(spec, TensorSpec):
                    spec.shape = [largest(number) for number in spec.shape]
                    spec.stride = tuple(largest(number) for number in spec.stride)
        return PassResult(graph_module, True)
