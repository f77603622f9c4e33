"""XNNPACK's partitioner as graphs of transformer blocks need it."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from server_export.lower.partitioning import LevelPartitioner


class BlockPartitioner(LevelPartitioner):
    """Delegates by level, of programs in core operators.

    ExecuTorch traces a program three times to ask which linear layers are to stay whole, where all are.
    """

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], None]:
        """What stays whole, wherever it is: no function is returned that asks about every node."""
        operators, _ = super().ops_to_not_decompose(ep)
        # Sizes are in the table too. A program that has nothing else of it isn't traced once more.
        sizes = [] if ep.dialect == "EDGE" else [torch.ops.aten.sym_size.int]
        return [*operators, *sizes], None
