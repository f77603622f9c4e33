"""Trace a model without weights into one graph of all its operators, at symbolic sizes.

The numbers of rows, tokens and copies are large primes, so they are recognized wherever they appear in a
shape. No tensor of the graph has memory: the model's tensors are known by name, and are read when the files
of a block are written. `server_export.trace.patterns` holds what only some models need.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import UserError
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from prge.errors import PrgeError, Refusal, first_line
from prge.model_spec import Matrix
from server_export.adapter.layers import CallInputs
from server_export.checkpoint.classifier import hidden_states_of
from server_export.ir.markers import BATCH, TOKENS
from server_export.ir.operators import Category, members
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.ir.traversal import readers
from server_export.trace import attention, patterns
from server_export.trace.functional import functional_graph
from server_export.trace.model_graph import ModelGraph, TracedModel
from server_export.trace.passes import Changes, module_of
from server_export.trace.patterns import Call
from server_export.trace.tables import ModelTables

aten = torch.ops.aten
_LAYOUTS = {
    *members(Category.IDENTITY, Category.CAST, Category.RESHAPE, Category.SQUEEZE, Category.EXPAND),
    *(aten.slice.Tensor, aten.detach_.default, aten._assert_tensor_metadata.default),
}


@dataclass(frozen=True)
class Traced:
    """The traced graph of a model, and the adapter's matrices by placeholder, in order.

    The placeholders are tokens i64 [rows, tokens]; the padding f32 [rows, 1, 1, tokens] of an encoder or the
    targets i64 [rows, tokens] of a decoder; the shift f32 [rows, tokens, 1] of a decoder; and every trainable
    matrix f32 [copies, rank, width] of the adapter.
    """

    graph_module: GraphModule
    adapter: dict[str, Matrix]


class _ModelWithReadout(nn.Module):
    """The model with its readout at every position: `softmax_parts` of the logits, or hidden states."""

    def __init__(
        self,
        traced: TracedModel,
        inputs: CallInputs,
        adapter: Sequence[Matrix],
        first_position: int,
        call: Call,
    ) -> None:
        super().__init__()
        self.model = traced.model
        self.traced = traced
        self.inputs = inputs
        self.adapter = adapter
        self.first_position = first_position
        self.call = call
        self.accepted = frozenset(inspect.signature(traced.base.forward).parameters)

    def forward(
        self, tokens: torch.Tensor, mask_or_targets: torch.Tensor, shift: torch.Tensor, *adapter: torch.Tensor
    ) -> torch.Tensor:
        names = (matrix.name for matrix in self.adapter)
        self.inputs.adapter = dict(zip(names, adapter, strict=True))
        length, tables = tokens.shape[1], self.traced.tables
        values = {
            "position_ids": tables.positions(length, self.first_position),
            "token_type_ids": tables.zeros(length),
            "use_cache": False,
        }
        arguments = {name: value for name, value in values.items() if name in self.accepted}
        if not any(name.endswith("token_type_embeddings") for name, _ in self.model.named_modules()):
            arguments.pop("token_type_ids", None)
        padding = None if self.traced.is_decoder else mask_or_targets
        output = self.call(tokens, {**arguments, "attention_mask": padding, "return_dict": True}, padding)
        if self.traced.is_decoder:
            parts: torch.Tensor = SOFTMAX_PARTS(output.logits, shift, mask_or_targets.unsqueeze(-1))
            return parts
        return hidden_states_of(output, length)


class _NumbersOnCpu(TorchFunctionMode):
    """Keeps tensors that a model creates from numbers on the CPU, so that their values are known."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            args = (args[0], tuple(_as_slice(index) for index in args[1]))
        is_number = function is torch.tensor and isinstance(args[0], bool | int | float)
        return function(*args, **{**(kwargs or {}), **({"device": "cpu"} if is_number else {})})


def _as_slice(index: Any) -> Any:
    """Return a list of one integer as a slice, for which PyTorch creates no tensor."""
    if isinstance(index, list) and len(index) == 1 and type(index[0]) is int:
        return slice(index[0], index[0] + 1 or None)
    return index


def trace(
    traced: TracedModel,
    inputs: CallInputs,
    adapter: Sequence[Matrix],
    *,
    first_position: int,
    copies: int,
    changes: Changes | None = None,
) -> Traced:
    """Trace a model whose adapted layers, attention and rotary embeddings read `inputs` and its tables.

    Args:
        traced: the model, which is modified.
        inputs: the inputs of its adapted layers.
        adapter: the trainable matrices, in order.
        first_position: the first position of a row.
        copies: 1, or COPIES.
        changes: records what patterns changed in the model.

    Raises:
        Refusal: the model's own code does something that no graph can express.
    """
    model, is_decoder = traced.model, traced.is_decoder
    attention.register()
    model.set_attn_implementation(attention.NAME)
    patterns.prepare(traced, changes)
    for module in model.modules():
        module.tables = traced.tables
        if is_decoder or hasattr(module, "is_causal"):
            # Some models leave causality to the mask that they pass.
            module.is_causal = is_decoder or module.is_causal
    rows = copies * BATCH
    with torch.device("meta"), torch.no_grad():
        tokens = torch.empty(rows, TOKENS, dtype=torch.long)
        mask_or_targets = tokens.clone() if is_decoder else torch.empty(rows, 1, 1, TOKENS)
        matrices = [torch.empty(copies, matrix.rank, matrix.width) for matrix in adapter]
        example_inputs = (tokens, mask_or_targets, torch.empty(rows, TOKENS, 1), *matrices)

        def call_model(tokens: torch.Tensor, arguments: dict[str, Any], padding: torch.Tensor | None) -> Any:
            return model(input_ids=tokens, **arguments)

        def exported(call: Call) -> ExportedProgram:
            model_with_readout = _ModelWithReadout(traced, inputs, adapter, first_position, call).eval()
            with _NumbersOnCpu():
                return torch.export.export(model_with_readout, example_inputs, strict=False)

        with patterns.tracing(traced, call_model, changes) as call:
            program = _export_reading_masks(traced, exported, call, changes)
    graph_module = functional_graph(program)
    placeholders = [str(node.target) for node in graph_module.graph.find_nodes(op="placeholder")]
    return Traced(graph_module, dict(zip(placeholders[3:], adapter, strict=True)))


def _export_reading_masks(
    traced: TracedModel, exported: Callable[[Call], ExportedProgram], call: Call, changes: Changes | None
) -> ExportedProgram:
    """Return a program that reads the model's masks, traced again with a pattern if necessary."""
    program, failure = None, None
    try:
        program = exported(call)
        if _reads_masks(program, traced):
            return program
    except PrgeError:
        raise
    except Exception as error:
        # An encoder with masks of its own may raise anything; the patterns below trace it again.
        failure = error
        if traced.is_decoder:
            with _refuse_data_dependence():
                raise
    for pattern in patterns.patterns():
        context = pattern.retrace(traced) if pattern.retrace is not None else None
        if context is not None:
            with ExitStack() as stack, _refuse_data_dependence():
                if changes is not None:
                    changes.of_parts(pattern.name, pattern.serves, ["masks"])
                wrap = stack.enter_context(context)
                return exported(wrap(traced, call))
    if program is None:
        assert failure is not None
        raise failure
    return program


@contextmanager
def _refuse_data_dependence() -> Iterator[None]:
    """Refuse a model whose control flow depends on values, as torch.export reports.

    Raises:
        Refusal: torch.export has found data-dependent control flow.
    """
    try:
        yield
    except (UserError, GuardOnDataDependentSymNode) as error:
        raise Refusal(
            "data-dependent-control-flow",
            f"The control flow of the model depends on values that it computes: {first_line(error)}",
            remedy="Programs can't branch on values. Use a checkpoint of another model type.",
        ) from error


def _reads_masks(program: ExportedProgram, traced: TracedModel) -> bool:
    """Return whether a decoder's attention reads causal masks, or an encoder only adds its padding."""
    return (
        _only_adds_padding(program)
        if not traced.is_decoder
        else not _has_no_causal_mask(program, traced.tables)
    )


def refuse_complex_values(graph: ModelGraph) -> None:
    """Raise Refusal if a model computes with complex numbers other than rotations."""
    for node in graph.graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_complex():
            raise Refusal(
                "complex-numbers",
                f"The model computes with complex numbers ({node.target}), which programs do not support.",
                operator=str(node.target),
                module=module_of(node),
                remedy="Use a checkpoint of another model type.",
            )


def _has_no_causal_mask(exported: ExportedProgram, tables: ModelTables) -> bool:
    """Return whether a traced decoder has attention, but none that reads a causal mask."""
    has_attention = any(exported.graph.find_nodes(op="call_function", target=aten.softmax.int))
    return has_attention and not any(table.type == "causal" for table in tables.all)


def _only_adds_padding(exported: ExportedProgram) -> bool:
    """Return whether a traced encoder adds its padding to scores and uses it for nothing else.

    A classification head may count the tokens of a row by comparing the padding.
    """
    (mask_or_targets,) = (
        n for n in exported.graph.find_nodes(op="placeholder") if n.name == "mask_or_targets"
    )
    return all(
        user.op == "output"
        or user.target in (aten.add.Tensor, aten.add_.Tensor)
        or (user.target is aten.ge.Scalar and user.args[1] == attention.MIN_SEEN)
        for user in readers(mask_or_targets, _LAYOUTS)
    )
