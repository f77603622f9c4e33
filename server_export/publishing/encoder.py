"""Publish a trained encoder as an inference program from tokens to pooled hidden states or class scores.

The program runs the blocks of the model's chain one after another, for rows of one length. In float32, the
adapter is merged into the weights; with quantized layers, it has constants of its own, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from prge.engine import Array
from prge.errors import Refusal
from prge.formats.peft import PeftAdapter
from prge.formats.signatures import LORA_B
from server_export.adapter.layers import per_token_layers
from server_export.check.engine import bind_method
from server_export.checkpoint.classifier import hidden_states_of
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import LoadedModel, load_meta_model
from server_export.checkpoint.weights import CheckpointWeights
from server_export.ir.constants import GraphConstants
from server_export.ir.modules import get_attribute
from server_export.lower.program import write_program
from server_export.model.chain import ModelChain, layer_name
from server_export.model.eager import EagerBlock
from server_export.pipeline import build_chain, with_int8, with_scheme
from server_export.publishing.program import METHOD, PROGRAM, ROWS, BuiltProgram, check_exact, check_quantized
from server_export.quantize.quantization import NO_LAYERS, BundleLayers, Int4Weight, check_codes
from server_export.trace.attention import padding_mask
from server_export.trace.positions import resolve_sequence_length
from server_export.trace.readout import pooling_of

aten = torch.ops.aten
torchao = torch.ops.torchao

Row = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class EncoderSpec:
    """Settings of an encoder's program.

    Attributes:
        length: number of tokens of a row.
        pooling: pooling of the hidden states; see server_export.trace.readout.
        scheme: quantization of the frozen layers.
        head: `weight` [classes, width] and `bias` of a classification head; None: there is none.
        layers: the quantized layers of the bundle that the adapter was trained with.
    """

    length: int
    pooling: str = "mean"
    scheme: str = "fp32"
    head: Mapping[str, Array] | None = None
    layers: BundleLayers = NO_LAYERS


class EncoderProgram(nn.Module):
    """A module from tokens and attention mask to pooled hidden states or class scores.

    Tokens and mask are i64 [1, length]; outputs are f32 [1, width] or [1, classes].

    Args:
        chain: blocks of an encoder without experts.
        spec: settings of the program.
        lora_b: f32 [rank, out] by the names of the chain's adapted layers.
    """

    def __init__(self, chain: ModelChain, spec: EncoderSpec, lora_b: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.pool = pooling_of(spec.pooling)
        self.head = None if spec.head is None else make_head(spec.head)
        self._blocks = [EagerBlock(chain, number) for number in range(len(chain.blocks))]
        # torch.export turns buffers into constants; equal tensors share a buffer.
        buffers = GraphConstants(self)
        self._adapter = {f"{LORA_B}.{name}": buffers.name(matrix[None]) for name, matrix in lora_b.items()}
        self._tensors = [
            {name: buffers.name(tensor) for name, tensor in _tensors_of(chain, block).items()}
            for block in self._blocks
        ]

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Compute pooled hidden states or class scores; see the class."""
        return self.compute(tokens, attention_mask)

    def compute(
        self,
        tokens: torch.Tensor,
        attention_mask: torch.Tensor,
        operators: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    ) -> torch.Tensor:
        """Compute the outputs of `forward`, with some operators of the blocks replaced by functions."""
        mask = attention_mask.to(torch.float32)
        padding, shared, state = padding_mask(mask), dict[int, torch.Tensor](), tokens
        adapter = {name: self.get_buffer(buffer) for name, buffer in self._adapter.items()}
        for block, names in zip(self._blocks, self._tensors, strict=True):
            # Read in each call, since torch.export replaces buffers while it traces.
            block.tensors = {name: self.get_buffer(buffer) for name, buffer in names.items()}
            state = block.compute(
                state,
                padding,
                adapter=adapter,
                shared=shared,
                operators={aten.expand.default: _expand, **operators},
            )
        pooled = self.pool(state, mask)
        return pooled if self.head is None else self.head(pooled)


class MergedWeights(CheckpointWeights):
    """Reads the weights of a checkpoint with a trained adapter merged into its layers."""

    def __init__(self, weights: CheckpointWeights, adapter: PeftAdapter) -> None:
        vars(self).update(vars(weights))
        self._adapter = adapter

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Read a weight; see CheckpointWeights. The weight of an adapted layer is always read whole."""
        weight, adapter = super().read(name, rows), self._adapter
        layer, _, part = name.rpartition(".")
        if part != "weight" or layer not in adapter.lora_a:
            return weight
        lora_a, lora_b = (torch.from_numpy(each[layer]) for each in (adapter.lora_a, adapter.lora_b))
        return weight + lora_b @ lora_a * adapter.scale_of(layer)


def build_encoder(folder: Path, merged: LoadedModel, adapter: PeftAdapter, spec: EncoderSpec) -> BuiltProgram:
    """Lower an encoder to `program.pte` in `folder`, and compare the program with the model.

    Args:
        folder: folder of the program.
        merged: transformers' own model with the adapter merged into its weights.
        adapter: the same adapter, for the blocks, whose weights are read from the model's files.
        spec: settings of the program.

    Raises:
        ConfigError: the model has fewer positions than a row has tokens.
        BundleError: the model can't be lowered, or outputs of the program differ from the model's.
    """
    resolve_sequence_length(merged, spec.length)
    rows = [_row(merged.config, spec.length, seed) for seed in range(ROWS)]
    reference = torch.stack([_reference(merged, spec, *row) for row in rows])
    chain = encoder_chain(merged, adapter, spec)
    lora_b = {module.name: torch.from_numpy(adapter.lora_b[module.name]).T for module in chain.modules}
    program = folder / PROGRAM

    def outputs_of(
        module: EncoderProgram, operators: Mapping[Any, Callable[..., Any]] = MappingProxyType({})
    ) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([module.compute(*row, operators) for row in rows])

    def engine_outputs_of(module: EncoderProgram) -> torch.Tensor:
        write_program(program, {METHOD: (module, rows[0])})
        return torch.stack([bind_method(program, METHOD, row)()[0] for row in rows])

    is_exact = spec.scheme == "fp32"
    module = EncoderProgram(chain if is_exact else with_scheme(chain, "fp32"), spec, lora_b)
    exact = outputs_of(module)
    check_exact("chain of blocks", exact, reference)
    if is_exact:
        checks = check_exact("program", engine_outputs_of(module), exact)
    else:
        module = EncoderProgram(chain, spec, lora_b)
        expected, unrounded = outputs_of(module), outputs_of(module, without_rounding())
        checks = check_quantized(engine_outputs_of(module), expected, unrounded, exact)
    inputs = [
        {"name": name, "dtype": "int64", "shape": (1, spec.length)} for name in ("tokens", "attention_mask")
    ]
    name, shape = "pooled" if spec.head is None else "scores", tuple(reference.shape[1:])
    facts = {"inputs": inputs, "outputs": [{"name": name, "dtype": "float32", "shape": shape}]}
    return BuiltProgram("inference", facts, chain.quantization, checks)


def encoder_chain(model: LoadedModel, adapter: PeftAdapter, spec: EncoderSpec) -> ModelChain:
    """Return the blocks of an encoder for a program, with layers rounded as in the bundle.

    Args:
        model: the model, whose weights are read from its files.
        adapter: the adapter, which is merged into float32 weights; with quantized weights, its `lora_a`
            becomes a scaled constant.
        spec: settings of the program.

    Raises:
        Refusal: the model can't be written as blocks, or the blocks can't be one program.
        BundleError: a layer of the bundle has another shape.
    """
    outline = load_meta_model(
        model.name_or_path,
        pooled=True,
        revision=model.revision,
        own_head=model.classifier is not None,
    )
    # Runs the model on a few tokens, as an export does to find layers to adapt. As a side effect, BigBird
    # switches to full attention.
    per_token_layers(outline.model, [])
    is_merged = spec.scheme == "fp32"
    adapted = [name for name, _ in outline.model.named_modules() if name in adapter.lora_a]
    chain = build_chain(
        outline,
        find_files(model.name_or_path, model.revision),
        {}
        if is_merged
        else {name: torch.from_numpy(adapter.lora_a[name]) * adapter.scale_of(name) for name in adapted},
        longest=spec.length,
        scheme=spec.scheme,
        copies=1,
    )
    if any(block.is_expert for block in chain.blocks):
        raise Refusal(
            "experts-in-one-program",
            f"{model.name_or_path} can't be published as program, since a program can't route to experts.",
            remedy="Publish it as peft or merged.",
        )
    if is_merged:
        return replace(chain, weights=MergedWeights(chain.weights, adapter))
    return with_layers(chain, spec.layers)


def with_layers(chain: ModelChain, layers: BundleLayers) -> ModelChain:
    """Return blocks whose layers are rounded as in a bundle.

    Args:
        chain: the blocks, in an integer scheme.
        layers: the quantized layers of the bundle.

    Raises:
        BundleError: a layer of the bundle has another shape; raised when the block's tensors are read.
    """
    int8 = {
        number: names
        for number, block in enumerate(chain.blocks)
        if (names := frozenset(name for name in block.weights if layer_name(name) in layers.int8))
    }
    if int8:
        chain = with_int8(chain, int8)
    int4, weights = frozenset(layers.int4), chain.weights

    def codes_of(number: int) -> Mapping[str, Int4Weight]:
        names = {
            name: layer_name(name)
            for name in chain.blocks[number].weights
            if layer_name(name) in int4 and name.endswith(".weight")
        }
        codes = {name: layers.int4[layer] for name, layer in names.items()}
        for name, each in codes.items():
            check_codes(names[name], each, weights.stored_shape(f"{names[name]}.weight") or ())
        return codes

    return replace(chain, rounded=codes_of) if int4 else chain


def make_head(head: Mapping[str, Array]) -> nn.Linear:
    """Return the linear layer of a classification head with `weight` and `bias`."""
    weight, bias = (torch.from_numpy(np.array(head[name], np.float32)) for name in ("weight", "bias"))
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = (nn.Parameter(value, requires_grad=False) for value in (weight, bias))
    return layer


def _tensors_of(chain: ModelChain, block: EagerBlock) -> dict[str, torch.Tensor]:
    """Return all tensors that a block's graph reads, by name: its own, and constants of its block type."""
    graph_module = chain.block_types[chain.type_of[block.number]].block.graph_module
    names = {str(node.target): None for node in graph_module.graph.find_nodes(op="get_attr")}
    tensors = block.tensors
    return {
        name: _unshared(tensors[name] if name in tensors else get_attribute(graph_module, name))
        for name in names
    }


def _unshared(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with memory of its own: XNNPACK would store the beginning of shared memory instead."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _expand(source: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Expand a tensor; a mask that is repeated for each head is expanded by an addition.

    XNNPACK lacks the expand operator, which would split its delegate. An addition is possible if the last two
    dimensions don't change.
    """
    expanded = source.expand(sizes)
    is_mask = source.is_floating_point() and source.shape[-2:] == expanded.shape[-2:]
    return source + torch.zeros(expanded.shape) if is_mask else expanded


def without_rounding() -> dict[Any, Callable[..., Any]]:
    """Return replacements of quantization operators that round no activations; weights stay rounded."""
    dequantize = torchao.dequantize_affine.default

    def keep(values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return values

    def dequantize_codes(codes: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        values: torch.Tensor = codes if codes.is_floating_point() else dequantize(codes, *arguments, **named)
        return values

    return {torchao.quantize_affine.default: keep, dequantize: dequantize_codes}


def _reference(
    model: LoadedModel, spec: EncoderSpec, tokens: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return the output of transformers' own model for a row without its padding."""
    end = int(mask.sum())
    tokens, mask = tokens[:, :end], mask[:, :end]
    with torch.no_grad():
        output = model.model(input_ids=tokens, attention_mask=mask, return_dict=True)
        states = hidden_states_of(output, end)
        pooled = pooling_of(spec.pooling)(states, mask.to(states.dtype))
        return pooled if spec.head is None else make_head(spec.head)(pooled)


def _row(config: Any, length: int, seed: int) -> Row:
    """Return random tokens and their mask; seed 0 has no padding.

    The padding token occurs only where the mask is 0, since RoBERTa computes positions from it.
    """
    generator = torch.Generator().manual_seed(seed)
    end = length if seed == 0 else int(torch.randint(1, length + 1, (1,), generator=generator))
    tokens = torch.randint(0, config.vocab_size, (1, length), generator=generator)
    mask = (torch.arange(length) < end).long().reshape(1, length)
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:
        other = padding + 1 if padding + 1 < config.vocab_size else 0
        tokens = torch.where(mask.bool(), torch.where(tokens == padding, other, tokens), padding)
    return tokens, mask
