"""A model without weights becomes one graph of all its operators, in sizes that mark what they are.

Rows, tokens and copies are large primes, so that wherever one shows in a shape it is known. No tensor of the
graph has memory: the model's are named, and read when a block's are written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from prge.errors import BundleError, PrgeError, told_as_bundle_error
from prge.model_spec import Matrix
from server_export.adapter.layers import CallInputs
from server_export.checkpoint.classifier import given_to_base, states_of
from server_export.checkpoint.indexers import choose_nothing, indexers
from server_export.ir.markers import BATCH, TOKENS
from server_export.ir.modules import remove_unused_attributes, replace_tensor
from server_export.ir.operators import Category, members
from server_export.ir.plain import take_apart
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.ir.walks import readers
from server_export.trace import attention
from server_export.trace import expert_blocks as experts
from server_export.trace.experts import choose_experts
from server_export.trace.functional import functional_graph
from server_export.trace.neighbours import write_neighbours
from server_export.trace.positions import any_length
from server_export.trace.recurrent import traced_recurrences, write_convolutions
from server_export.trace.rotation import write_complex
from server_export.trace.tables import ModelTables

aten = torch.ops.aten
_LAID_OUT = {
    *members(Category.IDENTITY, Category.CAST, Category.RESHAPE, Category.SQUEEZE, Category.EXPAND),
    *(aten.slice.Tensor, aten.detach_.default, aten._assert_tensor_metadata.default),
}
# What a token has at least of padding's additive mask, and padding hasn't.
_LEAST_SEEN = -1
# What a graph's names of weights have before transformers' own.
WHOLE_PREFIX = "model."
_REMEDY = "this architecture isn't supported; take another checkpoint, and please report it"


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
        model: nn.Module,
        inputs: CallInputs,
        tables: ModelTables,
        adapter: Sequence[Matrix],
        first_position: int,
        has_own_masks: bool = False,
        has_classes: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.has_classes = has_classes
        self.inputs = inputs
        self.tables = tables
        self.adapter = adapter
        self.first_position = first_position
        self.has_own_masks = has_own_masks
        base: Any = getattr(model, model.base_model_prefix) if has_classes else model
        self.accepted = frozenset(inspect.signature(base.forward).parameters)

    def forward(
        self, tokens: torch.Tensor, beside: torch.Tensor, shift: torch.Tensor, *adapter: torch.Tensor
    ) -> torch.Tensor:
        names = (matrix.name for matrix in self.adapter)
        self.inputs.adapter = dict(zip(names, adapter, strict=True))
        length = tokens.shape[1]
        is_decoder = beside.dim() == 2
        positions = self.tables.positions(length, self.first_position)
        values = {
            # What has masks of its own may want a number for each of them.
            "position_ids": positions.expand(tokens.shape) if self.has_own_masks else positions,
            "token_type_ids": self.tables.zeros(length),
            "use_cache": False,
        }
        arguments = {name: value for name, value in values.items() if name in self.accepted}
        if not any(name.endswith("token_type_embeddings") for name, _ in self.model.named_modules()):
            arguments.pop("token_type_ids", None)
        mask = None if is_decoder else beside
        if self.has_own_masks:
            mask = (beside >= _LEAST_SEEN).reshape(beside.shape[0], length).long()
        arguments |= {"attention_mask": mask, "return_dict": True}
        if self.has_classes:
            # A head may count the tokens of a row.
            seen = (beside >= _LEAST_SEEN).reshape(beside.shape[0], length).float()
            with given_to_base(self.model, arguments):
                output: Any = self.model(input_ids=tokens, attention_mask=seen, return_dict=True)
        else:
            output = self.model(input_ids=tokens, **arguments)
        if is_decoder:
            parts: torch.Tensor = SOFTMAX_PARTS(output.logits, shift, beside.unsqueeze(-1))
            return parts
        return states_of(output, length)


class _WithKnownNumbers(TorchFunctionMode):
    """Numbers that a model makes tensors of are known, and not without memory as all else.

    Args:
        lengths: so is a whole number that it asks of a tensor: how long the longest row is.
    """

    def __init__(self, lengths: bool) -> None:
        super().__init__()
        self.lengths = lengths

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.lengths and function is torch.Tensor.item and args[0].dtype is torch.long:
            return TOKENS
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
    model: Any,
    inputs: CallInputs,
    tables: ModelTables,
    adapter: Sequence[Matrix],
    is_decoder: bool,
    first_position: int,
    copies: int,
    has_classes: bool = False,
) -> Traced:
    """The graph of a model whose adapted layers, attention and rotary embeddings ask `inputs` and `tables`.

    Args:
        model: on the meta device, with its adapter inserted.
        inputs: of its adapted layers.
        tables: of its blocks.
        adapter: the trained matrices, in order.
        is_decoder: whether it answers what it reads of logits; an encoder answers states.
        first_position: the number of a row's first position.
        copies: 1, or COPIES.
        has_classes: whether an encoder has the layers of its own classification head, but for the last.

    Raises:
        BundleError: torch.export can't trace it, or it has a recurrence of a kind that isn't known.
    """
    attention.register()
    model.set_attn_implementation(attention.INDEXED if indexers(model) else attention.NAME)
    choose_nothing(model)
    experts.register(model)
    for module in model.modules():
        if is_decoder or hasattr(module, "is_causal"):
            module.tables = tables
            # Some leave it to the mask that they give.
            module.is_causal = is_decoder or module.is_causal
    rows = copies * BATCH
    with torch.device("meta"), torch.no_grad():
        tokens = torch.empty(rows, TOKENS, dtype=torch.long)
        beside = tokens.clone() if is_decoder else torch.empty(rows, 1, 1, TOKENS)
        trained = [torch.empty(copies, matrix.rank, matrix.width) for matrix in adapter]
        shift = torch.empty(rows, TOKENS, 1)
        given = (tokens, beside, shift, *trained)

        def whole(has_own_masks: bool) -> nn.Module:
            return _Whole(model, inputs, tables, adapter, first_position, has_own_masks, has_classes).eval()

        longer = any_length(model, TOKENS, first_position + 1)
        with told_as_bundle_error("the model can't be traced", _REMEDY), longer as own:
            exported = _exported(model, tables, whole, given)
    graph_module = functional_graph(exported)
    _put_back(graph_module, own)
    write_complex(graph_module)
    write_neighbours(graph_module, tables)
    write_convolutions(graph_module, tables)
    choose_experts(graph_module)
    take_apart(graph_module)
    remove_unused_attributes(graph_module)
    _check_numbers(graph_module)
    placeholders = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]
    return Traced(graph_module, dict(zip(placeholders[3:], adapter, strict=True)))


def _exported(
    model: Any, tables: ModelTables, whole: Callable[[bool], nn.Module], given: tuple[torch.Tensor, ...]
) -> ExportedProgram:
    """The program of a model, whose attention gets the masks that it takes.

    Args:
        model: it.
        tables: of its blocks.
        whole: the model with its readout, and whether an encoder gets masks of tokens.
        given: its inputs.
    """

    def exported_with(has_own_masks: bool) -> ExportedProgram:
        with _WithKnownNumbers(has_own_masks), traced_recurrences(model, tables):
            return torch.export.export(whole(has_own_masks), given, strict=False)

    if given[1].dim() == 2:
        exported = exported_with(False)
        is_asked = model.config._attn_implementation == attention.NAME
        if not is_asked or not _lacks_masks(exported, tables):
            return exported
        # Its own attention gets masks that transformers makes; that of its other parts is asked.
        model.set_attn_implementation("eager")
        return exported_with(False)
    try:
        exported = exported_with(False)
        if _adds(exported):
            return exported
    except PrgeError:
        raise
    except Exception:  # it does more with the padding than to add it
        pass
    # It makes masks of its own, of what is a token and what is padding.
    model.set_attn_implementation(attention.PADDED)
    return exported_with(True)


def check_attention(model: Any, longest: int) -> None:
    """Raise BundleError if a model's attention doesn't see a whole text.

    Args:
        model: which may lack its weights.
        longest: tokens of the longest sequence.
    """
    chosen = min(indexers(model).values(), default=longest)
    if chosen < longest:
        raise BundleError(
            f"the attention of {type(model).__name__} sees only {chosen} tokens, which an indexer "
            f"chooses, and texts may have {longest}",
            remedy=f"export it with --context {chosen}",
        )
    in_chunks = "chunked_attention" in (getattr(model.config, "layer_types", None) or ())
    if in_chunks and longest > (chunk := int(model.config.attention_chunk_size)):
        raise BundleError(
            f"the attention of {type(model).__name__} sees only the tokens of a chunk of {chunk} "
            f"(attention_chunk_size), and texts may have {longest}",
            remedy=f"export it with --context {chunk}",
        )


def _put_back(graph_module: GraphModule, own: Mapping[str, torch.Tensor]) -> None:
    """Put a model's own tables in the place of those that it was traced with."""
    for node in graph_module.graph.find_nodes(op="get_attr"):
        if (table := own.get(str(node.target).removeprefix(WHOLE_PREFIX))) is not None:
            replace_tensor(graph_module, str(node.target), table)
            node.meta["val"] = table


def _check_numbers(graph_module: GraphModule) -> None:
    """Raise BundleError if a model computes with complex numbers other than rotations."""
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_complex():
            raise BundleError(
                f"the model computes with complex numbers ({node.target}), which no program has",
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
        or (user.target is aten.ge.Scalar and user.args[1] == _LEAST_SEEN)
        for user in readers(beside, _LAID_OUT)
    )
