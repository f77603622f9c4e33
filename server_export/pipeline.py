"""A model without weights becomes a chain of blocks: the passes of an export, in order.

outline -> adapter inserted -> traced -> cut into blocks -> a quantized, rewritten graph for each kind
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from prge.errors import BundleError
from prge.learning.vocabulary import pieces_of
from prge.model_spec import AdaptedModule, matrices
from server_export.adapter.layers import CallInputs, conv1d_names, convert_conv1d, insert_lora
from server_export.checkpoint.experts import expert_layers
from server_export.checkpoint.files import ModelFiles
from server_export.checkpoint.loading import LoadedModel, vocabulary_size
from server_export.checkpoint.weights import Weights
from server_export.ir.block import Block
from server_export.ir.markers import BATCH, COPIES, TOKENS
from server_export.ir.modules import give_memory
from server_export.ir.plain import take_apart
from server_export.ir.rewriting import rewrite
from server_export.model.chain import BlockType, ModelChain, no_codes
from server_export.model.frozen import freeze
from server_export.trace.cutting import ModelBlock, cut, kinds
from server_export.trace.expert_blocks import expert_blocks
from server_export.trace.heads import join_heads
from server_export.trace.positional import fold_positions
from server_export.trace.positions import first_position
from server_export.trace.readout import cut_head
from server_export.trace.rotation import turn_by_layers
from server_export.trace.tables import TABLE, ModelTables, make_rotary_tables
from server_export.trace.tracing import WHOLE_PREFIX, check_attention, trace

# What torch.export calls tensors that are made of numbers.
_MADE_OF_NUMBERS = "lifted_tensor"


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
    parts = cut(traced.graph_module, traced.adapter, TABLE)
    _check_constants(parts, weights)
    blocks = _with_experts(parts, model, copies * BATCH)
    blocks += blocks[-1:] * (len(head_rows) - 1)
    kind_of = kinds(blocks)
    end = len(blocks) - len(head_rows)
    _check_adapter(blocks, modules, end)
    return ModelChain(
        blocks,
        kind_of,
        _kinds(blocks, kind_of, scheme, end),
        tables,
        modules,
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


def _check_adapter(blocks: Sequence[ModelBlock], modules: Sequence[AdaptedModule], end: int) -> None:
    names = ", ".join(module.name for module in modules)
    if modules and not any(block.modules for block in blocks):
        raise BundleError(
            f"{names} can't be adapted: nothing that the model answers depends on what they compute",
            remedy="name other layers with --target-modules, or take another checkpoint",
        )
    for number in (0, *range(end, len(blocks))):
        if adapted := blocks[number].modules:
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
) -> dict[int, BlockType]:
    """The graphs of all kinds, by the number of their first block; `int8` as of `with_int8`."""
    made = {}
    for number in sorted(set(kind_of)):
        graph_module, frozen = freeze(blocks[number], scheme, number >= end, int8.get(number, ()))
        rewrite(graph_module)
        take_apart(graph_module, declined=True)
        turn_by_layers(graph_module)
        join_heads(graph_module)
        give_memory(graph_module)
        made[number] = BlockType(Block(graph_module, blocks[number].outputs), frozen)
    return made


def in_scheme(chain: ModelChain, scheme: str) -> ModelChain:
    """The same blocks, whose frozen weights are of another scheme."""
    kinds = _kinds(chain.blocks, chain.kind_of, scheme, chain.end)
    return replace(chain, kinds=kinds, scheme=scheme, rounded=no_codes)


def with_int8(chain: ModelChain, layers: Mapping[int, frozenset[str]]) -> ModelChain:
    """The same blocks with some layers in int8 where the others are int4.

    Args:
        chain: of blocks in int4.
        layers: names of a block's own weights, by its number. Blocks with others are another kind.
    """
    first: dict[tuple[int, frozenset[str]], int] = {}
    kind_of = []
    for number, kind in enumerate(chain.kind_of):
        own = dict(zip(chain.blocks[number].weights, chain.blocks[kind].weights, strict=True))
        alike = frozenset(own[name] for name in layers.get(number, ()))
        kind_of.append(first.setdefault((kind, alike), number))
    kinds = _kinds(chain.blocks, kind_of, chain.scheme, chain.end, layers)
    return replace(chain, kind_of=kind_of, kinds=kinds)


def plain_layers(model: torch.nn.Module) -> set[str]:
    """Turn GPT-2's layers of a model without weights into linear ones; names of weights to transpose."""
    transposed = {f"{name}.weight" for name in conv1d_names(model)}
    with torch.device("meta"):
        convert_conv1d(model)
    return transposed
