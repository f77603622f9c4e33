"""XNNPACK's partitioner as graphs of transformer blocks need it."""

from __future__ import annotations

from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec
from torch.export import ExportedProgram


class BlockPartitioner(XnnpackPartitioner):
    """XNNPACK's choice of operators, without what costs most of a lowering and does nothing here.

    ExecuTorch traces a program three times to ask which linear layers are to stay whole, where all are. And
    XNNPACK rewrites each delegate sixteen times (convolutions, batch norms, paddings, clones); its own option
    leaves only the rewriting of matrix products.
    """

    def __init__(self) -> None:
        super().__init__()
        options = [CompileSpec("dqlinear_partitioner", b"")]
        self.delegation_spec = DelegationSpec(XnnpackBackend.__name__, options)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], None]:
        """What stays whole, wherever it is: no function is returned that asks about every node."""
        operators, _ = super().ops_to_not_decompose(ep)
        # Sizes are in the table too. A program that has nothing else of it isn't traced once more.
        sizes = [] if ep.dialect == "EDGE" else [torch.ops.aten.sym_size.int]
        return [*operators, *sizes], None
