"""A model without weights becomes a chain of blocks: the passes of an export, in order.

    check        what its patterns can't export is refused
    prepare      adapters, rotary tables, and what its patterns replace of the model
    trace        one graph of the whole model
    WHOLE        passes over that graph
    cut          blocks, where one value alone is alive, and their types
    BLOCK        freeze, then passes over the graph of each type

What only some architectures need is a pattern, a file of `server_export/trace/patterns/`, whose passes run at
a stage of its own. `prge export --describe_changes` prints what changed something in a model.
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
from server_export.ir.markers import BATCH, COPIES
from server_export.ir.modules import allocate_meta_tensors, remove_unused_attributes
from server_export.ir.plain import decompose
from server_export.ir.rewriting import rewrite
from server_export.model.chain import BlockType, ModelChain, no_codes
from server_export.quantize.frozen import freeze
from server_export.trace import patterns
from server_export.trace.cutting import ModelBlock, block_types, cut
from server_export.trace.model_graph import WHOLE_PREFIX, ModelGraph, TracedModel
from server_export.trace.passes import ALL, Changes, Pass, run_passes
from server_export.trace.patterns import Stage
from server_export.trace.positional import fold_positions, remove_redundant_casts
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
    changes: Changes | None = None,
) -> ModelChain:
    """Cut a model into blocks.

    Args:
        outline: the model without weights; it is changed.
        files: of its weights.
        lora_a: f32 [rank, in] by adapted layer, scaled if it is frozen, in module order.
        scales: of LoRA by layer, as `insert_lora` takes them; None: LoRA-FA.
        longest: tokens of the longest sequence.
        transposed: what `linearize_conv1d` answered of it.
        scheme: of the frozen weights.
        copies: 1, or COPIES for a graph of any number of them.
        changes: gets what each pass and each pattern changed.

    Raises:
        BundleError: the files can't be read.
        Refusal: the model can't be exported, or its adapter is outside of the blocks between the embedding
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
        of_model := TracedModel(model, tables, outline.is_decoder, outline.classifier is not None),
        inputs,
        matrices(modules),
        first_position=first_position(model),
        copies=copies,
        changes=changes,
    )
    graph = ModelGraph(traced.graph_module, of_model, weights.buffers)
    run_passes(with_patterns(WHOLE), graph, graph.graph_module, changes)
    parts = cut(graph.graph_module, traced.adapter, TABLE)
    _check_constants(parts, weights)
    blocks = patterns.with_blocks(model, parts, copies * BATCH)
    blocks += blocks[-1:] * (len(head_rows) - 1)
    type_of = block_types(blocks)
    end = len(blocks) - len(head_rows)
    _check_adapter(blocks, modules, end)
    return ModelChain(
        blocks,
        type_of,
        _block_types(blocks, type_of, scheme, end, changes=changes),
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
    """Passes in order, those of patterns at their stages among them."""
    for each in passes:
        if isinstance(each, Pass):
            yield each
        else:
            yield from patterns.passes_at(each)


def describe_changes(changes: Changes) -> str:
    """The passes and patterns that changed something in a model, in order, one line each."""
    return "\n".join(change.describe() for change in changes)


def _check_constants(blocks: Sequence[ModelBlock], weights: CheckpointWeights) -> None:
    """A tensor that a model makes of numbers while it runs has none while it is traced."""
    names = {name.removeprefix(WHOLE_PREFIX) for block in blocks for name in block.weights}
    if lost := sorted(name for name in names - set(weights.buffers) if _MADE_OF_NUMBERS in name):
        raise Refusal(
            "tensor-of-numbers",
            f"the model makes a tensor of numbers while it runs, which tracing loses: {lost[0]}",
            remedy="this architecture isn't supported; take another checkpoint, and please report it",
        )


def _check_adapter(blocks: Sequence[ModelBlock], modules: Sequence[AdaptedModule], end: int) -> None:
    names = ", ".join(module.name for module in modules)
    if modules and not any(block.modules for block in blocks):
        raise Refusal(
            "adapter-without-effect",
            f"{names} can't be adapted: nothing that the model answers depends on what they compute",
            remedy="name other layers with --target-modules, or take another checkpoint",
        )
    for number in (0, *range(end, len(blocks))):
        if adapted := blocks[number].modules:
            raise Refusal(
                "adapter-outside-blocks",
                f"{', '.join(adapted)} can't be adapted: it belongs to the "
                f"{'head' if number else 'embedding'}, and only the blocks between are trained",
                remedy="name other layers with --target-modules",
            )


def _head_rows(model: torch.nn.Module) -> tuple[list[Sequence[int]], str]:
    """Rows of each piece of a model's head, which is left as many as one has, and its name."""
    words, width = map(int, model.get_output_embeddings().weight.shape)
    size = words // count_shards(words, width)
    rows: list[Sequence[int]] = [range(start, start + size) for start in range(0, words, size)]
    return rows, shorten_head(model, len(rows[0]))


def _block_types(
    blocks: Sequence[ModelBlock],
    type_of: Sequence[int],
    scheme: str,
    end: int,
    int8: Mapping[int, frozenset[str]] = MappingProxyType({}),
    changes: Changes | None = None,
) -> dict[int, BlockType]:
    """The graphs of all types, by the number of their first block; `int8` as of `with_int8`."""
    made = {}
    for number in sorted(set(type_of)):
        graph_module, frozen = freeze(blocks[number], scheme, number >= end, int8.get(number, ()))
        run_passes(with_patterns(BLOCK), graph_module, graph_module, changes)
        made[number] = BlockType(Block(graph_module, blocks[number].outputs), frozen)
    return made


def with_scheme(chain: ModelChain, scheme: str) -> ModelChain:
    """The same blocks, whose frozen weights are of another scheme."""
    types = _block_types(chain.blocks, chain.type_of, scheme, chain.head_start)
    return replace(chain, block_types=types, scheme=scheme, rounded=no_codes)


def with_int8(chain: ModelChain, layers: Mapping[int, frozenset[str]]) -> ModelChain:
    """The same blocks with some layers in int8 where the others are int4.

    Args:
        chain: of blocks in int4.
        layers: names of a block's own weights, by its number. Blocks with others are of another type.
    """
    first: dict[tuple[int, frozenset[str]], int] = {}
    type_of = []
    for number, first_of_type in enumerate(chain.type_of):
        own = dict(zip(chain.blocks[number].weights, chain.blocks[first_of_type].weights, strict=True))
        alike = frozenset(own[name] for name in layers.get(number, ()))
        type_of.append(first.setdefault((first_of_type, alike), number))
    types = _block_types(chain.blocks, type_of, chain.scheme, chain.head_start, layers)
    return replace(chain, type_of=type_of, block_types=types)


def linearize_conv1d(model: torch.nn.Module) -> set[str]:
    """Turn GPT-2's layers of a model without weights into linear ones; names of weights to transpose."""
    transposed = {f"{name}.weight" for name in conv1d_names(model)}
    with torch.device("meta"):
        convert_conv1d(model)
    return transposed
