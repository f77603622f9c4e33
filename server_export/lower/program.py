"""A whole module as one program file, with its weights inside and shapes that don't change."""

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
from server_export.ir.rewriting import quantize_apart, rewritten_graph
from server_export.library_errors import executorch_errors

if TYPE_CHECKING:
    from executorch.exir import ExecutorchBackendConfig

# Operators of a piece, which is prepared while the engine's threads stay awake.
_PIECE = 45


def write_program(path: Path, methods: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]) -> None:
    """Lower modules to the methods of one `.pte`, each for inputs of the shapes given.

        write_program(Path("program.pte"), {"forward": (module, inputs)})

    Raises:
        Refusal: torch.export can't trace one, or ExecuTorch refuses it.
    """
    programs = {}
    for name, (module, inputs) in methods.items():
        graph_module = rewritten_graph(module, inputs)
        write_core_operators(graph_module)
        quantize_apart(graph_module.graph)
        graph_module.recompile()
        with torch.no_grad():
            programs[name] = torch.export.export(graph_module, inputs, strict=False)
    executorch = lowered(programs)
    with path.open("wb") as stream:
        executorch.write_to_file(stream)


def lowered(
    programs: Mapping[str, ExportedProgram],
    config: ExecutorchBackendConfig | None = None,
    facts: Mapping[str, Any] | None = None,
    in_pieces: Collection[str] = (),
) -> Any:
    """ExecuTorch's program manager of the methods of one `.pte`, with all that XNNPACK takes in delegates.

    Args:
        programs: in core operators, by method.
        config: of what comes after delegation.
        facts: what methods without inputs answer, by their names.
        in_pieces: methods of small layers; see server_export.lower.partitioning.

    Raises:
        Refusal: ExecuTorch refuses one.
    """
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    from server_export.lower.xnnpack import BlockPartitioner

    refusal = refused_as(
        "not-lowered",
        "ExecuTorch can't lower the program",
        executorch_errors(),
        remedy="please report it with the name of the model",
    )
    with refusal, _collector_paused(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about torch's own use of torch
        edge = to_edge_transform_and_lower(
            dict(programs),
            partitioner={
                name: [BlockPartitioner(_PIECE if name in in_pieces else None)] for name in programs
            },
            # Both cost time: the program is checked by running it, and no tensor has an odd layout.
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods=None if facts is None else dict(facts),
        )
        return edge.to_executorch(config)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from walking millions of live graph objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
