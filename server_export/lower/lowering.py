"""Program modules become a `.pte`: torch.export, rewriting, tangents, XNNPACK, memory planning."""

from __future__ import annotations

import gc
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prge.errors import told_as_bundle_error
from server_export.graph.permuting import join_transpositions
from server_export.graph.rewriting import rewrite
from server_export.graph.rotation import rotate
from server_export.lower.edge import edge_program, to_core
from server_export.lower.lifting import exported_program

_BOOKKEEPING = ("getitem", "executorch_call_delegate", "alloc")


@dataclass(frozen=True)
class LoweringReport:
    """What became of a method's graph; bytes of constants and of the program are those of the whole file.

    `delegated_share` is the share of operators that run inside XNNPACK; `delegated_products` the share of
    multiply-accumulates of matrix products; `outside` counts the operators that portable kernels run.
    """

    delegated_share: float
    delegated_products: float
    delegates: int
    outside: dict[str, int]
    planned_memory_bytes: int
    constant_bytes: int
    program_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The manifest's `lowering` block."""
        return asdict(self)


@dataclass(frozen=True)
class LoweredProgram:
    """A `.pte` and what became of each of its methods; `executorch` is ExecuTorch's program manager."""

    executorch: Any
    reports: dict[str, LoweringReport]

    @property
    def buffer(self) -> bytes:
        """The bytes of the file, in one piece."""
        return bytes(self.executorch.buffer)

    def write(self, path: Path) -> None:
        """Write the file from the pieces that it is made of, without a copy of the weights."""
        with path.open("wb") as stream:
            self.executorch.write_to_file(stream)


def export_graph(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    """The graph of a module with static shapes, those of `inputs`, ready to be lowered.

    Raises:
        BundleError: torch.export can't trace it.
    """
    graph_module = rewritten_graph(module, inputs)
    rotate(graph_module)
    return retraced(graph_module, inputs)


def rewritten_graph(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.fx.GraphModule:
    """The graph of a module in operators that XNNPACK takes; its nodes carry `meta["val"]`.

    Raises:
        BundleError: torch.export can't trace it.
    """
    with _tracing():
        exported = torch.export.export(module, inputs, strict=False)
        graph_module = exported.module(check_guards=False)
        rewrite(graph_module)
    return graph_module


def retraced(
    graph_module: torch.fx.GraphModule, inputs: tuple[torch.Tensor, ...]
) -> torch.export.ExportedProgram:
    """A rewritten graph, ready to be lowered.

    Raises:
        BundleError: torch.export can't trace it.
    """
    with _tracing():
        return exported_program(to_core(graph_module), inputs, join_transpositions)


@contextmanager
def _tracing() -> Iterator[None]:
    """What torch.export can't trace becomes a BundleError."""
    refusal = told_as_bundle_error(
        "torch.export can't trace the program",
        "the architecture isn't supported; take another checkpoint, and please report it",
    )
    with refusal, torch.no_grad(), collector_paused():
        yield


def lower(programs: Mapping[str, torch.export.ExportedProgram]) -> LoweredProgram:
    """Lower graphs to the methods of one `.pte` for XNNPACK; weights that they share are stored once.

        lower({"forward": export_graph(module, inputs)}).write(Path("program.pte"))

    Raises:
        BundleError: ExecuTorch refuses one.
    """
    from executorch.exir import EdgeCompileConfig, EdgeProgramManager

    from server_export.lower.delegation import in_two_processes
    from server_export.lower.partitioning import LevelPartitioner

    # Both cost much time: the program is checked by running it, and no tensor has an odd layout.
    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    refusal = told_as_bundle_error(
        "ExecuTorch can't lower the program", "please report it with the name of the model"
    )
    with refusal, collector_paused(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about torch's own use of torch
        methods = {method: edge_program(program, config) for method, program in programs.items()}
        manager = EdgeProgramManager(methods, compile_config=config)
        with in_two_processes():
            edge = manager.to_backend(LevelPartitioner())
        modules = {method: edge.exported_program(method).graph_module for method in programs}
        shares = {method: _shares(module) for method, module in modules.items()}
        for module in modules.values():
            _forget_what_delegates_compute(module)
        executorch = edge.to_executorch()
    constants = _constant_bytes(executorch)
    planned = {
        plan.name: sum(plan.non_const_buffer_sizes) for plan in executorch.executorch_program.execution_plan
    }
    return LoweredProgram(
        executorch,
        {
            method: LoweringReport(*share, planned[method], constants, len(executorch._pte_data))
            for method, share in shares.items()
        },
    )


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


def _forget_what_delegates_compute(graph_module: torch.fx.GraphModule) -> None:
    """Leave delegates that are lowered already with the shapes of their answers.

    Each of the passes that follow would interpret all that is inside of them to learn these shapes.
    """
    for node in _delegate_calls(graph_module):
        lowered = getattr(graph_module, str(node.args[0].target))
        original = lowered.original_module
        graph = torch.fx.Graph()
        inputs = [argument.meta["val"] for argument in node.args[1:]]
        for index in range(len(inputs)):
            graph.placeholder(f"input_{index}")
        graph.output(
            tuple(
                graph.call_function(
                    torch.ops.aten.empty.memory_format,
                    (list(answer.meta["val"].shape),),
                    {"dtype": answer.meta["val"].dtype},
                )
                for answer in original.graph.output_node().args[0]
            )
        )
        answers = torch.fx.GraphModule(nn.Module(), graph)
        lowered._original_exported_program = exported_program(
            answers, [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in inputs]
        )


def _delegate_calls(graph_module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for node in graph_module.graph.nodes:
        if "call_delegate" in str(node.target):
            yield node


def _shares(graph_module: torch.fx.GraphModule) -> tuple[float, float, int, dict[str, int]]:
    """Delegated share of operators and of products, number of delegates, operators outside."""
    outside = list(_operators(graph_module.graph.nodes))
    inside: list[torch.fx.Node] = []
    delegates = 0
    for node in _delegate_calls(graph_module):
        delegates += 1
        lowered = getattr(graph_module, str(node.args[0].target))
        inside += _operators(lowered.original_module.graph.nodes)
    products_inside, products_outside = (sum(map(_products, nodes)) for nodes in (inside, outside))
    return (
        len(inside) / max(1, len(inside) + len(outside)),
        products_inside / max(1, products_inside + products_outside),
        delegates,
        dict(Counter(_name(node) for node in outside).most_common()),
    )


def _operators(nodes: Iterable[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    for node in nodes:
        if node.op == "call_function" and not any(word in str(node.target) for word in _BOOKKEEPING):
            yield node


def _name(node: torch.fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).removeprefix("aten::") if schema is not None else str(node.target)


def _products(node: torch.fx.Node) -> int:
    """Multiply-accumulates of a matrix product, 0 for anything else."""
    name = _name(node)
    if name not in ("linear", "mm", "bmm", "addmm", "baddbmm"):
        return 0
    left = node.args[1 if name in ("addmm", "baddbmm") else 0]
    return math.prod(node.meta["val"].shape) * int(left.meta["val"].shape[-1])


def _constant_bytes(executorch: Any) -> int:
    """Weights in the program: constants of portable kernels and of delegates."""
    named = executorch._named_data
    delegate_data = sum(len(data) for data in named.buffers) if named is not None else 0
    return sum(len(data.storage) for data in executorch.executorch_program.constant_buffer) + delegate_data
