"""What memory is planned for: the largest sizes of a call.

XNNPACK's workspace is at least as large as the sizes in its program say, all of it touched, and grows with a
call. So its program has the example's sizes, and these bounds are ExecuTorch's alone: pages of an arena that
no call reaches take nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.utils._pytree as pytree
from executorch.exir.pass_base import PassBase, PassResult
from executorch.exir.tensor import TensorSpec
from torch.fx import GraphModule

from server_export.lower.sizes import Size, largest_of, maxima_of


def largest_shapes(sizes: Iterable[Size]) -> PassBase:
    """The pass that gives values of a call's sizes the shapes of the largest call.

    Raises:
        ValueError: two sizes of other maxima have the same example, by which they are told apart.
    """
    return _LargestShapes(maxima_of(sizes))


class _LargestShapes(PassBase):
    def __init__(self, maxima: Mapping[int, int]) -> None:
        super().__init__()
        self._maxima = maxima

    def call(self, graph_module: GraphModule) -> PassResult:
        """Write the shapes into the specs of all values."""
        largest = largest_of(graph_module.graph, self._maxima)
        for node in graph_module.graph.nodes:
            for spec in pytree.tree_leaves(node.meta.get("spec", [])):
                if isinstance(spec, TensorSpec):
                    spec.shape = [largest(number) for number in spec.shape]
                    spec.stride = tuple(largest(number) for number in spec.stride)
        return PassResult(graph_module, True)
