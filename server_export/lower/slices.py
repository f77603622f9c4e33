"""Slices of tensors with dynamic sizes in delegates of XNNPACK.

XNNPACK takes a slice of size 0 as the whole dimension, whatever its size is in a call. ExecuTorch writes the
sizes of the largest call instead, so it leaves slices of dynamic tensors out of delegates.
"""

from __future__ import annotations

from typing import Any

from executorch.backends.xnnpack.operators.node_visitor import _node_visitor_dict, register_node_visitor
from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
from executorch.backends.xnnpack.partition.config.generic_node_configs import SliceCopyConfig
from torch.export import ExportedProgram
from torch.fx import Node

_Slice: Any = _node_visitor_dict["aten.slice_copy.Tensor"]
# Index of the step among the arguments of a slice, after the source, the dimension and the bounds.
_STEP = 4


class DynamicSliceConfig(SliceCopyConfig):
    """Accepts slices of fixed bounds along a dimension of fixed size; other dimensions may be dynamic."""

    def check_constraints(self, node: Node, ep: ExportedProgram) -> bool:
        """Return whether XNNPACK can compute a slice."""
        if not self.check_common_constraints(node, ep):
            return False
        source, dim, *bounds = node.args
        size: Any = source.meta["val"].shape[dim]
        is_fixed = isinstance(size, int) and not any(isinstance(bound, Node) for bound in bounds)
        return is_fixed and node.args[_STEP:] in ((), (1,))


class DynamicSlice(_Slice):
    """Writes a slice into XNNPACK's graph, with size 0 for whole dimensions."""

    def define_node(self, node: Node, graph: Any, ids: dict[Node, int], debug_handle: int) -> None:
        """See ExecuTorch's NodeVisitor."""
        super().define_node(node, graph, ids, debug_handle)
        written, dim = graph.xnodes[-1].xnode_union, node.args[1]
        sliced = dim % written.num_dims
        written.sizes = [size if axis == sliced else 0 for axis, size in enumerate(written.sizes)]


register_node_visitor(DynamicSlice)
CONFIGS = [
    *(config for config in ALL_PARTITIONER_CONFIGS if config is not SliceCopyConfig),
    DynamicSliceConfig,
]
"""ExecuTorch's configurations of operators for XNNPACK, with `DynamicSliceConfig` for slices."""
