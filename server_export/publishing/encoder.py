"""A trained encoder as a plain inference program: tokens in, pooled states or class scores out.

The program is a model's chain of blocks, one after the other, for rows of one length. In float32 the adapter
is merged into the weights; beside quantized layers it is constants of its own, as in training.
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
from prge.files.peft import PeftAdapter
from prge.files.signatures import LORA_B
from server_export.adapter.layers import read_by_rows
from server_export.check.engine import loaded_method
from server_export.checkpoint.classifier import states_of
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import LoadedModel, outline_model
from server_export.checkpoint.weights import Weights
from server_export.ir.constants import Constants
from server_export.ir.modules import attribute
from server_export.lower.program import write_program
from server_export.model.chain import ModelChain, layer_of
from server_export.model.eager import EagerBlock
from server_export.pipeline import build_chain, in_scheme, with_int8
from server_export.publishing.program import METHOD, PROGRAM, ROWS, Built, check_exact, check_quantized
from server_export.quantize.quantization import NO_LAYERS, BundleLayers, Int4Weight, check_codes
from server_export.trace.attention import padding_mask
from server_export.trace.positions import longest_row
from server_export.trace.readout import pooling_of

aten = torch.ops.aten
torchao = torch.ops.torchao

Row = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class EncoderSpec:
    """What an encoder's program computes.

    Attributes:
        length: tokens of a row.
        pooling: of the states; see server_export.trace.readout.
        scheme: quantization of the frozen layers.
        head: `weight` [classes, width] and `bias` of a classification head.
        layers: as the bundle has them that the adapter was trained with.
    """

    length: int
    pooling: str = "mean"
    scheme: str = "fp32"
    head: Mapping[str, Array] | None = None
    layers: BundleLayers = NO_LAYERS


class EncoderProgram(nn.Module):
    """(tokens, attention_mask), i64 [1, length] both -> pooled states [1, width], or class scores.

    Args:
        chain: of an encoder without experts.
        spec: of the program.
        lora_b: f32 [rank, out] by the names of the chain's adapted layers.
    """

    def __init__(self, chain: ModelChain, spec: EncoderSpec, lora_b: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.pool = pooling_of(spec.pooling)
        self.head = None if spec.head is None else linear_of(spec.head)
        self._blocks = [EagerBlock(chain, number) for number in range(len(chain.blocks))]
        # Names of buffers, which torch.export takes for constants; of the same numbers there is one.
        buffers = Constants(self)
        self._adapter = {f"{LORA_B}.{name}": buffers.name(matrix[None]) for name, matrix in lora_b.items()}
        self._tensors = [
            {name: buffers.name(tensor) for name, tensor in _tensors_of(chain, block).items()}
            for block in self._blocks
        ]

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.answer(tokens, attention_mask)

    def answer(
        self,
        tokens: torch.Tensor,
        attention_mask: torch.Tensor,
        operators: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    ) -> torch.Tensor:
        """What `forward` gives, with functions in the place of some operators of the blocks."""
        mask = attention_mask.to(torch.float32)
        padding, shared, state = padding_mask(mask), dict[int, torch.Tensor](), tokens
        adapter = {name: self.get_buffer(buffer) for name, buffer in self._adapter.items()}
        for block, names in zip(self._blocks, self._tensors, strict=True):
            # Those of this call: while torch.export traces, buffers are others.
            block.tensors = {name: self.get_buffer(buffer) for name, buffer in names.items()}
            state = block.answer(
                state,
                padding,
                adapter=adapter,
                shared=shared,
                operators={aten.expand.default: _repeated, **operators},
            )
        pooled = self.pool(state, mask)
        return pooled if self.head is None else self.head(pooled)


class MergedWeights(Weights):
    """The weights of a checkpoint with a trained adapter merged into its layers."""

    def __init__(self, weights: Weights, adapter: PeftAdapter) -> None:
        vars(self).update(vars(weights))
        self._adapter = adapter

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """See Weights; an adapted layer's weight is read whole."""
        weight, adapter = super().read(name, rows), self._adapter
        layer, _, part = name.rpartition(".")
        if part != "weight" or layer not in adapter.lora_a:
            return weight
        lora_a, lora_b = (torch.from_numpy(each[layer]) for each in (adapter.lora_a, adapter.lora_b))
        return weight + lora_b @ lora_a * adapter.scale_of(layer)


def build_encoder(folder: Path, merged: LoadedModel, adapter: PeftAdapter, spec: EncoderSpec) -> Built:
    """Lower an encoder to `program.pte` in `folder`, and compare the program with the model.

    Args:
        folder: where to.
        merged: transformers' own model with the adapter merged into its weights.
        adapter: the same, for the blocks, whose weights are read from the model's files.
        spec: of the program.

    Raises:
        ConfigError: the model has fewer positions than a row has tokens.
        BundleError: it can't be lowered, or the program returns something else than the model.
    """
    longest_row(merged, spec.length)
    rows = [_row(merged.config, spec.length, seed) for seed in range(ROWS)]
    reference = torch.stack([_reference(merged, spec, *row) for row in rows])
    chain = encoder_chain(merged, adapter, spec)
    lora_b = {module.name: torch.from_numpy(adapter.lora_b[module.name]).T for module in chain.modules}
    program = folder / PROGRAM

    def answers_of(
        module: EncoderProgram, operators: Mapping[Any, Callable[..., Any]] = MappingProxyType({})
    ) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([module.answer(*row, operators) for row in rows])

    def answers_of_engine(module: EncoderProgram) -> torch.Tensor:
        write_program(program, {METHOD: (module, rows[0])})
        return torch.stack([loaded_method(program, METHOD, row)()[0] for row in rows])

    is_exact = spec.scheme == "fp32"
    module = EncoderProgram(chain if is_exact else in_scheme(chain, "fp32"), spec, lora_b)
    exact = answers_of(module)
    check_exact("chain of blocks", exact, reference)
    if is_exact:
        checks = check_exact("program", answers_of_engine(module), exact)
    else:
        module = EncoderProgram(chain, spec, lora_b)
        expected, smooth = answers_of(module), answers_of(module, without_rounding())
        checks = check_quantized(answers_of_engine(module), expected, smooth, exact)
    inputs = [
        {"name": name, "dtype": "int64", "shape": (1, spec.length)} for name in ("tokens", "attention_mask")
    ]
    name, shape = "pooled" if spec.head is None else "scores", tuple(reference.shape[1:])
    facts = {"inputs": inputs, "outputs": [{"name": name, "dtype": "float32", "shape": shape}]}
    return Built("inference", facts, chain.quantization, checks)


def encoder_chain(model: LoadedModel, adapter: PeftAdapter, spec: EncoderSpec) -> ModelChain:
    """The blocks of an encoder for a program; layers are rounded as the bundle has them.

    Args:
        model: tells which; its weights are read from its files.
        adapter: merged into float32 weights; beside others its `lora_a` is frozen, and scaled.
        spec: of the program.

    Raises:
        Refusal: the model can't be written as blocks, or its blocks not as one program.
        BundleError: a layer of the bundle has another shape.
    """
    outline = outline_model(
        model.name_or_path,
        pooled=True,
        revision=model.revision,
        own_head=model.classifier is not None,
    )
    # Computes shapes of a few tokens, as an export does that looks for layers to adapt: BigBird's attention
    # is the whole one from then on.
    read_by_rows(outline.model, [])
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
            f"{model.name_or_path} can't be published as program: one program can't choose among experts",
            remedy="publish it as peft or merged",
        )
    if is_merged:
        return replace(chain, weights=MergedWeights(chain.weights, adapter))
    return with_layers(chain, spec.layers)


def with_layers(chain: ModelChain, layers: BundleLayers) -> ModelChain:
    """The same blocks with layers that are rounded as a bundle has them.

    Args:
        chain: of a scheme of integers.
        layers: of the bundle.

    Raises:
        BundleError: a layer of the bundle has another shape; when the block's tensors are made.
    """
    int8 = {
        number: names
        for number, block in enumerate(chain.blocks)
        if (names := frozenset(name for name in block.weights if layer_of(name) in layers.int8))
    }
    if int8:
        chain = with_int8(chain, int8)
    known, weights = frozenset(layers.int4), chain.weights

    def codes_of(number: int) -> Mapping[str, Int4Weight]:
        names = {
            name: layer_of(name)
            for name in chain.blocks[number].weights
            if layer_of(name) in known and name.endswith(".weight")
        }
        codes = {name: layers.int4[layer] for name, layer in names.items()}
        for name, each in codes.items():
            check_codes(names[name], each, weights.stored_shape(f"{names[name]}.weight") or ())
        return codes

    return replace(chain, rounded=codes_of) if known else chain


def linear_of(head: Mapping[str, Array]) -> nn.Linear:
    """The layer of a head with `weight` and `bias`."""
    weight, bias = (torch.from_numpy(np.array(head[name], np.float32)) for name in ("weight", "bias"))
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = (nn.Parameter(value, requires_grad=False) for value in (weight, bias))
    return layer


def _tensors_of(chain: ModelChain, block: EagerBlock) -> dict[str, torch.Tensor]:
    """All that the graph of a block reads, by name: the block's own tensors, and constants of its type."""
    graph_module = chain.kinds[chain.kind_of[block.number]].block.graph_module
    names = {str(node.target): None for node in graph_module.graph.find_nodes(op="get_attr")}
    tensors = block.tensors
    return {
        name: _apart(tensors[name] if name in tensors else attribute(graph_module, name)) for name in names
    }


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is no part of another one's memory: XNNPACK stores what memory begins with."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _repeated(source: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """A value that is repeated along other dimensions than the last two, such as a mask for each head, as a
    sum: XNNPACK has no operator that repeats, which would part its delegate."""
    repeated = source.expand(sizes)
    is_mask = source.is_floating_point() and source.shape[-2:] == repeated.shape[-2:]
    return source + torch.zeros(repeated.shape) if is_mask else repeated


def without_rounding() -> dict[Any, Callable[..., Any]]:
    """Operators of quantized blocks that leave activations as they are; weights keep their rounding."""
    restore = torchao.dequantize_affine.default

    def keep(numbers: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return numbers

    def restored(codes: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        numbers: torch.Tensor = codes if codes.is_floating_point() else restore(codes, *given, **named)
        return numbers

    return {torchao.quantize_affine.default: keep, restore: restored}


def _reference(
    model: LoadedModel, spec: EncoderSpec, tokens: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """What transformers' own model answers of a row without its padding."""
    end = int(mask.sum())
    tokens, mask = tokens[:, :end], mask[:, :end]
    with torch.no_grad():
        answer = model.model(input_ids=tokens, attention_mask=mask, return_dict=True)
        states = states_of(answer, end)
        pooled = pooling_of(spec.pooling)(states, mask.to(states.dtype))
        return pooled if spec.head is None else linear_of(spec.head)(pooled)


def _row(config: Any, length: int, seed: int) -> Row:
    """Tokens and mask; the padding token stands where the mask is 0 alone: RoBERTa counts positions by it."""
    generator = torch.Generator().manual_seed(seed)
    end = length if seed == 0 else int(torch.randint(1, length + 1, (1,), generator=generator))
    tokens = torch.randint(0, config.vocab_size, (1, length), generator=generator)
    mask = (torch.arange(length) < end).long().reshape(1, length)
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:
        other = padding + 1 if padding + 1 < config.vocab_size else 0
        tokens = torch.where(mask.bool(), torch.where(tokens == padding, other, tokens), padding)
    return tokens, mask
