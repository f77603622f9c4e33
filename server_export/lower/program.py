"""A whole module as one program file, with its weights inside and shapes that don't change."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from prge.errors import told_as_bundle_error
from server_export.graph.core import write_core_operators
from server_export.graph.rewriting import rewritten_graph


def write_program(path: Path, methods: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]) -> None:
    """Lower modules to the methods of one `.pte`, each for inputs of the shapes given.

        write_program(Path("program.pte"), {"forward": (module, inputs)})

    Raises:
        BundleError: torch.export can't trace one, or ExecuTorch refuses it.
    """
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    from server_export.lower.xnnpack import BlockPartitioner

    programs = {}
    for name, (module, inputs) in methods.items():
        graph_module = rewritten_graph(module, inputs)
        write_core_operators(graph_module)
        with torch.no_grad():
            programs[name] = torch.export.export(graph_module, inputs, strict=False)
    refusal = told_as_bundle_error(
        "ExecuTorch can't lower the program", "please report it with the name of the model"
    )
    with refusal, collector_paused(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about torch's own use of torch
        edge = to_edge_transform_and_lower(
            programs,
            partitioner=[BlockPartitioner()],
            # Both cost time: the program is checked by running it, and no tensor has an odd layout.
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
        with path.open("wb") as stream:
            edge.to_executorch().write_to_file(stream)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from walking millions of live graph objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
