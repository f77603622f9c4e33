"""Turns a model without weights into a chain of blocks: the passes of an export, in order.

    check        unsupported models are refused, by each pattern's own checks
    prepare      adapters, rotary tables, and the modules that patterns replace
    trace        one graph of the whole model
    WHOLE        passes over that graph
    cut          blocks, at points where only one value is live, and their types
    BLOCK        freeze, then passes over the graph of each block type

What only some architectures need is a pattern: a file of `server_export/trace/patterns/`, whose passes run at
a stage of their own. `prge export --explain` prints the passes that changed a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule

from prge.errors import Refusal
from prge.model_spec import AdaptedModule, matrices
from prge.numerics.vocabulary_shards import count_shards
from server_export.adapter.layers import CallInputs, conv1d_names, convert_conv1d, insert_lora
from server_export.checkpoint.files import ModelFiles
from server_export.checkpoint.loading import LoadedModel, vocabulary_size
from server_export.checkpoint.weights import CheckpointWeights
from server_export.ir.block import Block
from server_export.ir.decomposition import decompose
from server_export.ir.markers import BATCH, COPIES
from server_export.ir.modules import allocate_meta_tensors, remove_unused_attributes
from server_export.ir.rewriting import rewrite
from server_export.model.chain import BlockType, ModelChain, no_codes
from server_export.quantize.frozen import freeze
from server_export.trace import patterns
from server_export.trace.cutting import ModelBlock, block_types, cut
from server_export.trace.model_graph import WHOLE_PREFIX, ModelGraph, TracedModel
from server_export.trace.passes import ALL, Changes, Pass, run_passes
from server_export.trace.patterns import Stage
from server_export.trace.position_folding import fold_positions, remove_redundant_casts
from server_export.trace.positions import first_position
from server_export.trace.readout import shorten_head
from server_export.trace.rotation import write_rotations_as_linear
from server_export.trace.tables import TABLE, ModelTables, make_rotary_tables
from server_export.trace.tracing import refuse_complex_values, trace

# Passes over the graph of the whole model, in order; a stage's name stands for the passes of patterns there.
WHOLE: tuple[Pass[ModelGraph] | Stage, ...] = (
    "traced",
    Pass("plain operators", ALL, lambda graph: decompose(graph.graph_module)),
    Pass("unused weights", ALL, lambda graph: remove_unused_attributes(graph.graph_module)),
    Pass("no complex numbers", ALL, refuse_complex_values),
    Pass("casts", ALL, lambda graph: remove_redundant_casts(graph.graph_module)),
    "positions",
    "tables",
    Pass("tables of positions", "models that compute with positions themselves", fold_positions),
)
# Passes over the graph of a block type, in order.
BLOCK: tuple[Pass[GraphModule] | Stage, ...] = (
    Pass("operators of XNNPACK", ALL, rewrite),
    Pass("declined operators", ALL, lambda graph_module: decompose(graph_module, declined=True)),
    Pass("rotations by layers", "models with rotary embeddings of halves", write_rotations_as_linear),
    "block",
    Pass("memory of weights", ALL, allocate_meta_tensors),
)

# Part of torch.export's names for tensors that are made of Python numbers.
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
    changes: Changes | None = None,
) -> ModelChain:
    """Split a model into blocks.

    Args:
        outline: the model without weights, which is changed.
        files: the files of its weights.
        lora_a: f32 [rank, in] by adapted layer, with the scale if it is frozen, in module order.
        scales: the scales of LoRA by layer, as in `insert_lora`; None for LoRA-FA.
        longest: the number of tokens of the longest sequence.
        transposed: the result of `linearize_conv1d`, if it was already called.
        scheme: the quantization of the frozen weights.
        copies: 1, or COPIES for a graph of any number of adapter copies.
        changes: collects what each pass and each pattern changed.

    Raises:
        BundleError: the files can't be read.
        Refusal: the model can't be exported, or an adapted layer is not in the blocks between the embedding
            and the head.
    """
    model = outline.model
    patterns.check_model(model, longest)
    transposed = {*transposed, *linearize_conv1d(model)}
    weights = CheckpointWeights(files, model, transposed)
    vocabulary = vocabulary_size(model)
    head_rows, head = _head_rows(model) if outline.is_decoder else ([], "")
    inputs, tables = CallInputs(), ModelTables(longest)
    modules = insert_lora(model, {name: a.to("meta") for name, a in lora_a.items()}, inputs, scales)
    make_rotary_tables(model, tables)
    traced = trace(
        traced_model := TracedModel(model, tables, outline.is_decoder, outline.classifier is not None),
        inputs,
        matrices(modules),
        first_position=first_position(model),
        copies=copies,
        changes=changes,
    )
    graph = ModelGraph(traced.graph_module, traced_model, weights.buffers)
    run_passes(with_patterns(WHOLE), graph, graph.graph_module, changes)
    parts = cut(graph.graph_module, traced.adapter, TABLE)
    _check_constants(parts, weights)
    blocks = patterns.with_blocks(model, parts, copies * BATCH)
    blocks += blocks[-1:] * (len(head_rows) - 1)
    type_of = block_types(blocks)
    head_start = len(blocks) - len(head_rows)
    _check_adapter(blocks, modules, head_start)
    return ModelChain(
        blocks,
        type_of,
        _block_types(blocks, type_of, scheme, head_start, changes=changes),
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


def with_patterns(passes: Sequence[Pass[Any] | Stage]) -> Iterator[Pass[Any]]:
    """Yield the passes in order, with the passes of patterns at their stages."""
    for each in passes:
        if isinstance(each, Pass):
            yield each
        else:
            yield from patterns.passes_at(each)


def describe_changes(changes: Changes) -> str:
    """Return the passes and patterns that changed a model in order, one per line."""
    return "\n".join(change.describe() for change in changes)


def _check_constants(blocks: Sequence[ModelBlock], weights: CheckpointWeights) -> None:
    """Refuse a model that makes tensors of numbers in its forward, whose values tracing loses."""
    names = {name.removeprefix(WHOLE_PREFIX) for block in blocks for name in block.weights}
    if lost := sorted(name for name in names - set(weights.buffers) if _MADE_OF_NUMBERS in name):
        raise Refusal(
            "tensor-of-numbers",
            f"The model makes a tensor of numbers in its forward, which tracing loses: {lost[0]}.",
            remedy="This architecture isn't supported. Use another checkpoint, and please report it.",
        )


def _check_adapter(blocks: Sequence[ModelBlock], modules: Sequence[AdaptedModule], head_start: int) -> None:
    """Refuse adapted layers that don't affect the outputs or are outside of the trained blocks."""
    names = ", ".join(module.name for module in modules)
    if modules and not any(block.modules for block in blocks):
        raise Refusal(
            "adapter-without-effect",
            f"Cannot adapt {names}: the model's outputs do not depend on them.",
            remedy="Choose other layers with --target-modules, or use another checkpoint.",
        )
    for number in (0, *range(head_start, len(blocks))):
        if adapted := blocks[number].modules:
            raise Refusal(
                "adapter-outside-blocks",
                f"Cannot adapt {', '.join(adapted)} in the {'head' if number else 'embedding'}: only the "
                "blocks in between are trained.",
                remedy="Choose other layers with --target-modules.",
            )


def _head_rows(model: torch.nn.Module) -> tuple[list[Sequence[int]], str]:
    """Cut a model's head to its first vocabulary shard; return the rows of all shards and its name."""
    vocabulary, width = map(int, model.get_output_embeddings().weight.shape)
    size = vocabulary // count_shards(vocabulary, width)
    rows: list[Sequence[int]] = [range(start, start + size) for start in range(0, vocabulary, size)]
    return rows, shorten_head(model, len(rows[0]))


def _block_types(
    blocks: Sequence[ModelBlock],
    type_of: Sequence[int],
    scheme: str,
    head_start: int,
    int8: Mapping[int, frozenset[str]] = MappingProxyType({}),
    changes: Changes | None = None,
) -> dict[int, BlockType]:
    """Return the graphs of all block types by the number of their first block; for `int8` see `with_int8`."""
    by_first_block = {}
    for number in sorted(set(type_of)):
        graph_module, frozen = freeze(blocks[number], scheme, number >= head_start, int8.get(number, ()))
        run_passes(with_patterns(BLOCK), graph_module, graph_module, changes)
        by_first_block[number] = BlockType(Block(graph_module, blocks[number].outputs), frozen)
    return by_first_block


def with_scheme(chain: ModelChain, scheme: str) -> ModelChain:
    """Return the same chain with another quantization of the frozen weights."""
    types = _block_types(chain.blocks, chain.type_of, scheme, chain.head_start)
    return replace(chain, block_types=types, scheme=scheme, rounded=no_codes)


def with_int8(chain: ModelChain, layers: Mapping[int, frozenset[str]]) -> ModelChain:
    """Return an int4 chain in which some layers are int8.

    Args:
        chain: a chain in int4.
        layers: the names of int8 weights by the number of their block. Blocks of a type with different int8
            layers become different types.
    """
    first: dict[tuple[int, frozenset[str]], int] = {}
    type_of = []
    for number, first_of_type in enumerate(chain.type_of):
        names_in_graph = dict(
            zip(chain.blocks[number].weights, chain.blocks[first_of_type].weights, strict=True)
        )
        int8_names = frozenset(names_in_graph[name] for name in layers.get(number, ()))
        type_of.append(first.setdefault((first_of_type, int8_names), number))
    types = _block_types(chain.blocks, type_of, chain.scheme, chain.head_start, layers)
    return replace(chain, type_of=type_of, block_types=types)


def linearize_conv1d(model: torch.nn.Module) -> set[str]:
    """Replace GPT-2's Conv1D layers of a model without weights; return the names of weights to transpose."""
    transposed = {f"{name}.weight" for name in conv1d_names(model)}
    with torch.device("meta"):
        convert_conv1d(model)
    return transposed
