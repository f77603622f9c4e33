"""A model without weights becomes one graph of all its operators, in sizes that mark what they are.

Rows, tokens and copies are large primes, so that wherever one shows in a shape it is known. No tensor of the
graph has memory: the model's are named, and read when a block's are written. What only some models need is
for `server_export.trace.patterns`.
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
from server_export.checkpoint.classifier import states_of
from server_export.ir.markers import BATCH, TOKENS
from server_export.ir.operators import Category, members
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.ir.walks import readers
from server_export.trace import attention, patterns
from server_export.trace.functional import functional_graph
from server_export.trace.model_graph import ModelGraph, TracedModel
from server_export.trace.passes import Changes, module_of
from server_export.trace.patterns import Call
from server_export.trace.tables import ModelTables

aten = torch.ops.aten
_LAID_OUT = {
    *members(Category.IDENTITY, Category.CAST, Category.RESHAPE, Category.SQUEEZE, Category.EXPAND),
    *(aten.slice.Tensor, aten.detach_.default, aten._assert_tensor_metadata.default),
}


@dataclass(frozen=True)
class Traced:
    """A graph whose placeholders are tokens i64 [rows, tokens]; an encoder's padding f32 [rows, 1, 1, tokens]
    or a decoder's targets i64 [rows, tokens]; a decoder's shift f32 [rows, tokens, 1]; and every trained
    matrix f32 [copies, rank, width] of the adapter.

    `adapter` has these matrices by placeholder, in order.
    """

    graph_module: GraphModule
    adapter: dict[str, Matrix]


class _Whole(nn.Module):
    """The model with its readout at every position: `softmax_parts` of logits, or states."""

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
        self, tokens: torch.Tensor, beside: torch.Tensor, shift: torch.Tensor, *adapter: torch.Tensor
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
        padding = None if self.traced.is_decoder else beside
        output = self.call(tokens, {**arguments, "attention_mask": padding, "return_dict": True}, padding)
        if self.traced.is_decoder:
            parts: torch.Tensor = SOFTMAX_PARTS(output.logits, shift, beside.unsqueeze(-1))
            return parts
        return states_of(output, length)


class _WithKnownNumbers(TorchFunctionMode):
    """Numbers that a model makes tensors of are known, and not without memory as all else."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            args = (args[0], tuple(_as_slice(place) for place in args[1]))
        known = function is torch.tensor and isinstance(args[0], bool | int | float)
        return function(*args, **{**(kwargs or {}), **({"device": "cpu"} if known else {})})


def _as_slice(place: Any) -> Any:
    """A list of one number as a slice, of which no tensor is made."""
    if isinstance(place, list) and len(place) == 1 and type(place[0]) is int:
        return slice(place[0], place[0] + 1 or None)
    return place


def trace(
    traced: TracedModel,
    inputs: CallInputs,
    adapter: Sequence[Matrix],
    *,
    first_position: int,
    copies: int,
    changes: Changes | None = None,
) -> Traced:
    """The graph of a model whose adapted layers, attention and rotary embeddings ask `inputs` and its tables.

    Args:
        traced: the model, which is changed.
        inputs: of its adapted layers.
        adapter: the trained matrices, in order.
        first_position: the number of a row's first position.
        copies: 1, or COPIES.
        changes: gets what patterns changed of the model.

    Raises:
        Refusal: the model's own code does what no graph can.
    """
    model, is_decoder = traced.model, traced.is_decoder
    attention.register()
    model.set_attn_implementation(attention.NAME)
    patterns.prepare(traced, changes)
    for module in model.modules():
        module.tables = traced.tables
        if is_decoder or hasattr(module, "is_causal"):
            # Some leave it to the mask that they give.
            module.is_causal = is_decoder or module.is_causal
    rows = copies * BATCH
    with torch.device("meta"), torch.no_grad():
        tokens = torch.empty(rows, TOKENS, dtype=torch.long)
        beside = tokens.clone() if is_decoder else torch.empty(rows, 1, 1, TOKENS)
        trained = [torch.empty(copies, matrix.rank, matrix.width) for matrix in adapter]
        given = (tokens, beside, torch.empty(rows, TOKENS, 1), *trained)

        def call_model(tokens: torch.Tensor, arguments: dict[str, Any], padding: torch.Tensor | None) -> Any:
            return model(input_ids=tokens, **arguments)

        def exported(call: Call) -> ExportedProgram:
            whole = _Whole(traced, inputs, adapter, first_position, call).eval()
            with _WithKnownNumbers():
                return torch.export.export(whole, given, strict=False)

        with patterns.tracing(traced, call_model, changes) as call:
            program = _with_masks_read(traced, exported, call, changes)
    graph_module = functional_graph(program)
    placeholders = [str(node.target) for node in graph_module.graph.find_nodes(op="placeholder")]
    return Traced(graph_module, dict(zip(placeholders[3:], adapter, strict=True)))


def _with_masks_read(
    traced: TracedModel, exported: Callable[[Call], ExportedProgram], call: Call, changes: Changes | None
) -> ExportedProgram:
    """The program of a model that reads the masks it is given, if need be in the context of a pattern."""
    program, failure = None, None
    try:
        program = exported(call)
        if _reads_masks(program, traced):
            return program
    except PrgeError:
        raise
    except Exception as error:
        # An encoder that doesn't just add its padding may raise anything; what is tried next is not caught.
        failure = error
        if traced.is_decoder:
            with _refusals():
                raise
    for pattern in patterns.patterns():
        context = pattern.retrace(traced) if pattern.retrace is not None else None
        if context is not None:
            with ExitStack() as stack, _refusals():
                if changes is not None:
                    changes.of_parts(pattern.name, pattern.serves, ["masks"])
                wrap = stack.enter_context(context)
                return exported(wrap(traced, call))
    if program is None:
        assert failure is not None
        raise failure
    return program


@contextmanager
def _refusals() -> Iterator[None]:
    """Refuse a model whose own code decides by numbers of a row, which torch.export says of it.

    Raises:
        Refusal: it does.
    """
    try:
        yield
    except (UserError, GuardOnDataDependentSymNode) as error:
        raise Refusal(
            "data-dependent-control-flow",
            f"the model's own code decides by numbers that it computes: {first_line(error)}",
            remedy="no program can follow it; take a checkpoint of another type",
        ) from error


def _reads_masks(program: ExportedProgram, traced: TracedModel) -> bool:
    """Whether a decoder's attention asks for causal masks, or an encoder adds its padding and no more."""
    return _adds(program) if not traced.is_decoder else not _lacks_masks(program, traced.tables)


def check_numbers(graph: ModelGraph) -> None:
    """Raise Refusal if a model computes with complex numbers other than rotations."""
    for node in graph.graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_complex():
            raise Refusal(
                "complex-numbers",
                f"the model computes with complex numbers ({node.target}), which no program has",
                operator=str(node.target),
                module=module_of(node),
                remedy="take a checkpoint of another type",
            )


def _lacks_masks(exported: ExportedProgram, tables: ModelTables) -> bool:
    """Whether a traced decoder has attention and none that asks for a causal mask."""
    has_attention = any(exported.graph.find_nodes(op="call_function", target=aten.softmax.int))
    return has_attention and not any(table.kind == "causal" for table in tables.all)


def _adds(exported: ExportedProgram) -> bool:
    """Whether a traced encoder adds the padding that it is given to scores, and does nothing else with it.

    What its classification head counts is no padding of scores.
    """
    (beside,) = (n for n in exported.graph.find_nodes(op="placeholder") if n.name == "beside")
    return all(
        user.op == "output"
        or user.target in (aten.add.Tensor, aten.add_.Tensor)
        or (user.target is aten.ge.Scalar and user.args[1] == attention.LEAST_SEEN)
        for user in readers(beside, _LAID_OUT)
    )
