"""A model as a chain of blocks, made of its configuration alone; weights are read when a block is written.

outline -> adapter inserted -> traced -> cut into blocks -> a quantized, rewritten graph for each kind
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch.fx import GraphModule

from prge.errors import BundleError
from prge.learning.vocabulary import pieces_of
from prge.model_spec import AdaptedModule, Matrix, matrices
from server_export.adapter.layers import CallInputs, conv1d_names, convert_conv1d, insert_lora
from server_export.checkpoint.experts import expert_layers
from server_export.checkpoint.files import ModelFiles
from server_export.checkpoint.loading import LoadedModel, vocabulary_size
from server_export.checkpoint.weights import Weights
from server_export.ir.markers import BATCH, COPIES, TOKENS
from server_export.ir.modules import give_memory
from server_export.ir.plain import take_apart
from server_export.ir.rewriting import rewrite
from server_export.model.frozen import ADAPTER_WEIGHT, Frozen, freeze
from server_export.model.quantization import GROUP_SIZE, ROWS_AT_ONCE, Int4Weight, QuantizationReport
from server_export.trace.cutting import STATE, ModelBlock, cut, kinds
from server_export.trace.expert_blocks import expert_blocks
from server_export.trace.heads import join_heads
from server_export.trace.positional import fold_positions
from server_export.trace.positions import first_position
from server_export.trace.readout import cut_head
from server_export.trace.rotation import turn_by_layers
from server_export.trace.tables import TABLE, ModelTables, make_rotary_tables
from server_export.trace.tracing import WHOLE_PREFIX, check_attention, trace

_BASE = ".base."
# What torch.export calls tensors that are made of numbers.
_MADE_OF_NUMBERS = "lifted_tensor"


def no_codes(number: int) -> Mapping[str, Int4Weight]:
    """Codes of a block where nothing was calibrated."""
    return {}


@dataclass(frozen=True)
class ModelKind:
    """The graph of all blocks of a kind, in marker sizes, and how a block's weights become its tensors."""

    graph_module: GraphModule
    frozen: Frozen


@dataclass
class ModelChain:
    """A model's blocks in order.

    `kind_of` has each block's number in `kinds`; `adapter` the trained matrix of each placeholder;
    `has_own_head`: an encoder's states are what the last layer of its own head reads.
    `head_rows` the rows of a head's tensors that each of its blocks has: a piece of the vocabulary.
    `rounded` has codes of a block's int4 layers by the names of their weights; others are rounded as they are
    read.
    """

    blocks: list[ModelBlock]
    kind_of: list[int]
    kinds: dict[int, ModelKind]
    tables: ModelTables
    modules: tuple[AdaptedModule, ...]
    adapter: dict[str, Matrix]
    weights: Weights
    lora_a: Mapping[str, torch.Tensor]
    head_rows: Sequence[Sequence[int]]
    head: str
    vocabulary_size: int
    scheme: str
    has_own_head: bool
    rounded: Callable[[int], Mapping[str, Int4Weight]] = no_codes

    @property
    def classes(self) -> int:
        """Tokens that a decoder's head answers among."""
        return sum(map(len, self.head_rows))

    @property
    def end(self) -> int:
        """Number of the first block that answers no state."""
        return len(self.blocks) - len(self.head_rows)

    @property
    def shared(self) -> list[int]:
        """The number of the block that makes each shared value."""
        return [number for number, block in enumerate(self.blocks) for _ in block.gives]

    @property
    def is_decoder(self) -> bool:
        """Whether it has a head."""
        return bool(self.head_rows)

    @property
    def generates(self) -> bool:
        """Whether it has a head for the whole vocabulary."""
        return self.classes == self.vocabulary_size

    @property
    def quantization(self) -> QuantizationReport:
        """What is quantized and how."""
        if self.scheme == "fp32":
            return QuantizationReport()
        per_channel, embeddings = list[str](), list[str]()
        for number, kind in enumerate(self.kind_of):
            frozen = self.kinds[kind].frozen
            own = self.own_names(number)
            embeddings += frozen.embeddings
            if self.scheme == "8da4w":
                per_channel += [
                    layer_of(own.get(name, name)) for name, groups in frozen.layers.items() if not groups
                ]
        return QuantizationReport(
            self.scheme,
            GROUP_SIZE if self.scheme == "8da4w" else None,
            tuple(dict.fromkeys(per_channel)),
            "int8" if embeddings else "fp32",
        )

    def in_scheme(self, scheme: str) -> ModelChain:
        """The same blocks, whose frozen weights are of another scheme."""
        kinds = _kinds(self.blocks, self.kind_of, scheme, self.end)
        return replace(self, kinds=kinds, scheme=scheme, rounded=no_codes)

    def with_int8(self, layers: Mapping[int, frozenset[str]]) -> ModelChain:
        """The same blocks with some layers in int8 where the others are int4.

        Args:
            layers: names of a block's own weights, by its number. Blocks with others are another kind.
        """
        first: dict[tuple[int, frozenset[str]], int] = {}
        kind_of = []
        for number, kind in enumerate(self.kind_of):
            own = dict(zip(self.blocks[number].weights, self.blocks[kind].weights, strict=True))
            alike = frozenset(own[name] for name in layers.get(number, ()))
            kind_of.append(first.setdefault((kind, alike), number))
        kinds = _kinds(self.blocks, kind_of, self.scheme, self.end, layers)
        return replace(self, kind_of=kind_of, kinds=kinds)

    def own_names(self, number: int) -> dict[str, str]:
        """The names of a block's weights by those that its kind's graph has for them."""
        kind = self.blocks[self.kind_of[number]]
        return dict(zip(kind.weights, self.blocks[number].weights, strict=True))

    def state_widths(self, number: int) -> tuple[int, int]:
        """Widths of what enters and leaves a block with a state."""
        graph = self.blocks[number].graph_module.graph
        (state,) = graph.find_nodes(op="placeholder", target=STATE)
        answer = graph.output_node().args[0][0]
        return state.meta["val"].shape[-1], answer.meta["val"].shape[-1]

    def turns(self, count: int) -> list[range]:
        """The first blocks in order, the experts of a layer together."""
        found: list[range] = []
        for number, block in enumerate(self.blocks[:count]):
            starts = not block.is_expert or not self.blocks[number - 1].is_expert
            found.append(range(number if starts else found.pop().start, number + 1))
        return found

    def tensors(self, number: int) -> dict[str, torch.Tensor]:
        """The tensors that a block's kind reads, made of the block's weights.

        Raises:
            BundleError: the files lack a weight, or it isn't finite.
        """
        rows = self.head_rows[number - self.end] if number >= self.end else None
        block = self.blocks[number]
        frozen = self.kinds[self.kind_of[number]].frozen
        names = [name.removeprefix(WHOLE_PREFIX) for name in block.weights]
        read = [
            self.weights.pieces(name, ROWS_AT_ONCE)
            if place in frozen.tables
            else self._read(name, rows, block.is_expert)
            for place, name in enumerate(names)
        ]
        own, rounded = self.own_names(number), self.rounded(number)
        codes = {
            name: rounded[own.get(name, name)] for name in frozen.layers if own.get(name, name) in rounded
        }
        return dict(frozen.tensors(read, codes))

    def _read(self, name: str, rows: Sequence[int] | None, of_expert: bool) -> torch.Tensor:
        layer, _, part = name.rpartition(".")
        if part == ADAPTER_WEIGHT:
            return self.lora_a[layer]
        if of_expert and part.isdigit():
            return self.weights.read(layer, range(int(part), int(part) + 1))[0]
        return self.weights.read(name.replace(_BASE, "."), rows if layer == self.head else None)


def build_chain(
    outline: LoadedModel,
    files: ModelFiles,
    lora_a: Mapping[str, torch.Tensor],
    *,
    scales: Mapping[str, float] | None = None,
    longest: int,
    transposed: Collection[str] = (),
    scheme: str = "fp32",
    copies: int = COPIES,
) -> ModelChain:
    """Cut a model into blocks.

    Args:
        outline: the model without weights; it is changed.
        files: of its weights.
        lora_a: f32 [rank, in] by adapted layer, scaled if it is frozen, in module order.
        scales: of LoRA by layer, as `insert_lora` takes them; None: LoRA-FA.
        longest: tokens of the longest sequence.
        transposed: what `plain_layers` answered of it.
        scheme: of the frozen weights.
        copies: 1, or COPIES for a graph of any number of them.

    Raises:
        BundleError: the files can't be read, or the adapter is outside of the blocks between the embedding
            and the head.
    """
    model = outline.model
    check_attention(model, longest)
    transposed = {*transposed, *plain_layers(model)}
    weights = Weights(files, model, transposed)
    vocabulary = vocabulary_size(model)
    head_rows, head = _head_rows(model) if outline.is_decoder else ([], "")
    inputs, tables = CallInputs(), ModelTables(longest)
    modules = insert_lora(model, {name: a.to("meta") for name, a in lora_a.items()}, inputs, scales)
    make_rotary_tables(model, tables)
    trained = matrices(modules)
    traced = trace(
        model,
        inputs,
        tables,
        trained,
        outline.is_decoder,
        first_position(model),
        copies,
        outline.classifier is not None,
    )
    weights.buffers |= fold_positions(traced.graph_module, tables, weights.buffers)
    parts = cut(traced.graph_module, set(traced.adapter), TABLE)
    _check_constants(parts, weights)
    blocks = _with_experts(parts, model, copies * BATCH)
    blocks += blocks[-1:] * (len(head_rows) - 1)
    kind_of = kinds(blocks)
    end = len(blocks) - len(head_rows)
    _check_adapter(blocks, traced.adapter, end)
    return ModelChain(
        blocks,
        kind_of,
        _kinds(blocks, kind_of, scheme, end),
        tables,
        modules,
        traced.adapter,
        weights,
        lora_a,
        head_rows,
        head,
        vocabulary,
        scheme,
        outline.classifier is not None,
    )


def _with_experts(parts: Sequence[ModelBlock], model: torch.nn.Module, rows: int) -> list[ModelBlock]:
    """Blocks with the experts that they ask behind them."""
    layers = [*expert_layers(model).items()]
    blocks = list[ModelBlock]()
    for block in parts:
        blocks.append(block)
        if block.experts is not None:
            name, module = layers[block.experts]
            blocks += expert_blocks(WHOLE_PREFIX + name, module, rows, TOKENS)
    return blocks


def _check_constants(blocks: Sequence[ModelBlock], weights: Weights) -> None:
    """A tensor that a model makes of numbers while it runs has none while it is traced."""
    names = {name.removeprefix(WHOLE_PREFIX) for block in blocks for name in block.weights}
    if lost := sorted(name for name in names - set(weights.buffers) if _MADE_OF_NUMBERS in name):
        raise BundleError(
            f"the model makes a tensor of numbers while it runs, which tracing loses: {lost[0]}",
            remedy="this architecture isn't supported; take another checkpoint, and please report it",
        )


def _check_adapter(blocks: Sequence[ModelBlock], adapter: Mapping[str, Matrix], end: int) -> None:
    names = ", ".join(dict.fromkeys(each.of for each in adapter.values()))
    if adapter and not any(block.adapter for block in blocks):
        raise BundleError(
            f"{names} can't be adapted: nothing that the model answers depends on what they compute",
            remedy="name other layers with --target-modules, or take another checkpoint",
        )
    for number in (0, *range(end, len(blocks))):
        if adapted := list(dict.fromkeys(adapter[name].of for name in blocks[number].adapter)):
            raise BundleError(
                f"{', '.join(adapted)} can't be adapted: it belongs to the "
                f"{'head' if number else 'embedding'}, and only the blocks between are trained",
                remedy="name other layers with --target-modules",
            )


def _head_rows(model: torch.nn.Module) -> tuple[list[Sequence[int]], str]:
    """Rows of each piece of a model's head, which is left as many as one has, and its name."""
    words, width = map(int, model.get_output_embeddings().weight.shape)
    size = words // pieces_of(words, width)
    rows: list[Sequence[int]] = [range(start, start + size) for start in range(0, words, size)]
    return rows, cut_head(model, len(rows[0]))


def _kinds(
    blocks: Sequence[ModelBlock],
    kind_of: Sequence[int],
    scheme: str,
    end: int,
    int8: Mapping[int, frozenset[str]] = MappingProxyType({}),
) -> dict[int, ModelKind]:
    """The graphs of all kinds, by the number of their first block; `int8` as of `ModelChain.with_int8`."""
    made = {}
    for number in sorted(set(kind_of)):
        graph_module, frozen = freeze(blocks[number], scheme, number >= end, int8.get(number, ()))
        rewrite(graph_module)
        take_apart(graph_module, declined=True)
        turn_by_layers(graph_module)
        join_heads(graph_module)
        give_memory(graph_module)
        made[number] = ModelKind(graph_module, frozen)
    return made


def layer_of(weight: str) -> str:
    """The model's name of the layer that a block's weight belongs to."""
    return weight.removeprefix(WHOLE_PREFIX).replace(_BASE, ".").rpartition(".")[0]


def plain_layers(model: torch.nn.Module) -> set[str]:
    """Turn GPT-2's layers of a model without weights into linear ones; names of weights to transpose."""
    transposed = {f"{name}.weight" for name in conv1d_names(model)}
    with torch.device("meta"):
        convert_conv1d(model)
    return transposed
