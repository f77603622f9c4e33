"""Lower modules to a program file that contains their weights, for fixed shapes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import ExportedProgram

from prge.errors import refused_as
from server_export.ir.core import write_core_operators
from server_export.ir.rewriting import rewritten_graph, unshare_quantizations
from server_export.library_errors import executorch_errors

if TYPE_CHECKING:
    from executorch.exir import ExecutorchBackendConfig

# Maximum number of operators of a split delegate: preparing this many keeps the engine's threads awake.
_SPLIT_OPERATORS = 45


def write_program(path: Path, methods: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]) -> None:
    """Lower modules to the methods of one `.pte`, for the shapes of the given inputs.

        write_program(Path("program.pte"), {"forward": (module, inputs)})

    Raises:
        Refusal: torch.export can't trace a module, or ExecuTorch refuses it.
    """
    programs = {}
    for name, (module, inputs) in methods.items():
        graph_module = rewritten_graph(module, inputs)
        write_core_operators(graph_module)
        unshare_quantizations(graph_module.graph)
        graph_module.recompile()
        with torch.no_grad():
            programs[name] = torch.export.export(graph_module, inputs, strict=False)
    executorch = lower_programs(programs)
    with path.open("wb") as stream:
        executorch.write_to_file(stream)


def lower_programs(
    programs: Mapping[str, ExportedProgram],
    config: ExecutorchBackendConfig | None = None,
    metadata: Mapping[str, Any] | None = None,
    split_methods: Collection[str] = (),
) -> Any:
    """Lower the methods of one `.pte`, with delegates of XNNPACK, and return ExecuTorch's program manager.

    Args:
        programs: the methods by name, in core operators.
        config: ExecuTorch's settings after delegation.
        metadata: return values of methods without inputs, by name.
        split_methods: methods of small layers, whose delegates are split; see
            server_export.lower.partitioning.

    Raises:
        Refusal: ExecuTorch refuses a method.
    """
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    from server_export.lower.xnnpack import BlockPartitioner

    refusal = refused_as(
        "not-lowered",
        "ExecuTorch can't lower the program",
        executorch_errors(),
        remedy="Please report the problem with the name of the model.",
    )
    with refusal, _collector_paused(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns about its own calls
        edge = to_edge_transform_and_lower(
            dict(programs),
            partitioner={
                name: [BlockPartitioner(_SPLIT_OPERATORS if name in split_methods else None)]
                for name in programs
            },
            # Both checks take time; programs are verified in the engine, and all tensors are contiguous.
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods=None if metadata is None else dict(metadata),
        )
        return edge.to_executorch(config)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which would visit millions of live graph objects repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
