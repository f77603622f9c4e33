"""XNNPACK's partitioner for graphs of transformer blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from server_export.lower.partitioning import LevelPartitioner


class BlockPartitioner(LevelPartitioner):
    """Partitions programs in core operators into delegates by level.

    Without this class, ExecuTorch traces a program three times to find out which linear layers to preserve.
    Here, all of them are preserved.
    """

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], None]:
        """Return the operators to preserve everywhere, without a filter function that visits every node."""
        operators, _ = super().ops_to_not_decompose(ep)
        # With sym_size in the list, a program that has no other decomposable operator isn't traced again.
        sizes = [] if ep.dialect == "EDGE" else [torch.ops.aten.sym_size.int]
        return [*operators, *sizes], None
