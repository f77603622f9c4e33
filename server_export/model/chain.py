"""A model as a chain of blocks, made from its configuration; weights are read when a block is written.

server_export/pipeline.py builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from prge.formats.signatures import HIDDEN_STATES, Port
from prge.model_spec import AdaptedModule
from server_export.checkpoint.weights import CheckpointWeights
from server_export.ir.block import Block
from server_export.quantize.frozen import ADAPTER_WEIGHT, FrozenTensors
from server_export.quantize.quantization import GROUP_SIZE, ROWS_AT_ONCE, Int4Weight, QuantizationReport
from server_export.trace.cutting import ModelBlock
from server_export.trace.model_graph import WHOLE_PREFIX
from server_export.trace.tables import ModelTables

_BASE = ".base."


def no_codes(number: int) -> Mapping[str, Int4Weight]:
    """Return no codes: the `rounded` of a chain that is not calibrated."""
    return {}


@dataclass(frozen=True)
class BlockType:
    """The graph of a block type, with marker sizes, and how a block's weights become the graph's tensors."""

    block: Block
    frozen: FrozenTensors


@dataclass
class ModelChain:
    """A model's blocks in order.

    Attributes:
        blocks: the blocks.
        type_of: for each block, the key of its type in `block_types`.
        block_types: the block types by the number of the first block of the type.
        tables: the model's tables of positions.
        modules: the adapted layers.
        weights: the model's weights.
        lora_a: frozen matrices f32 [rank, in] by adapted layer.
        head_rows: for each block of the head, the rows of the head's weight: its shard of the vocabulary.
        head: the name of the head.
        vocabulary_size: the number of tokens that the model knows.
        scheme: the quantization of the frozen weights.
        has_own_head: whether an encoder returns the inputs of its own classification head's last layer.
        rounded: returns the codes of a block's int4 layers by weight; other layers are rounded to the
            nearest.
    """

    blocks: list[ModelBlock]
    type_of: list[int]
    block_types: dict[int, BlockType]
    tables: ModelTables
    modules: tuple[AdaptedModule, ...]
    weights: CheckpointWeights
    lora_a: Mapping[str, torch.Tensor]
    head_rows: Sequence[Sequence[int]]
    head: str
    vocabulary_size: int
    scheme: str
    has_own_head: bool
    rounded: Callable[[int], Mapping[str, Int4Weight]] = no_codes

    @property
    def classes(self) -> int:
        """The number of tokens whose log-probabilities the head computes."""
        return sum(map(len, self.head_rows))

    @property
    def head_start(self) -> int:
        """The number of the first block of the head; without a head, the number of blocks."""
        return len(self.blocks) - len(self.head_rows)

    @property
    def shared(self) -> list[int]:
        """For each shared value, the number of the block that produces it."""
        return [number for number, block in enumerate(self.blocks) for _ in block.shared_out]

    @property
    def is_decoder(self) -> bool:
        """Whether the model has a vocabulary head."""
        return bool(self.head_rows)

    @property
    def can_generate(self) -> bool:
        """Whether the head covers the whole vocabulary."""
        return self.classes == self.vocabulary_size

    @property
    def quantization(self) -> QuantizationReport:
        """The quantization of the layers and the embeddings."""
        if self.scheme == "fp32":
            return QuantizationReport()
        per_channel, embeddings = list[str](), list[str]()
        for number, first in enumerate(self.type_of):
            frozen = self.block_types[first].frozen
            names = self.weight_names(number)
            embeddings += frozen.embeddings
            if self.scheme == "8da4w":
                per_channel += [
                    layer_name(names.get(name, name))
                    for name, is_int4 in frozen.layers.items()
                    if not is_int4
                ]
        return QuantizationReport(
            self.scheme,
            GROUP_SIZE if self.scheme == "8da4w" else None,
            tuple(dict.fromkeys(per_channel)),
            "int8" if embeddings else "fp32",
        )

    def weight_names(self, number: int) -> dict[str, str]:
        """Return the names of a block's weights by the names that its block type's graph has for them."""
        first = self.blocks[self.type_of[number]]
        return dict(zip(first.weights, self.blocks[number].weights, strict=True))

    def hidden_widths(self, number: int) -> tuple[int, int]:
        """Return the widths of the hidden states that enter and leave a block."""
        block = self.blocks[number]
        entering, leaving = block.inputs[Port(HIDDEN_STATES)].meta["val"], block.value(block.outputs[0])
        return entering.shape[-1], leaving.shape[-1]

    def block_groups(self, count: int) -> list[range]:
        """Return the first `count` blocks in order, as ranges that group the experts of each layer."""
        groups: list[range] = []
        for number, block in enumerate(self.blocks[:count]):
            is_first = not block.is_expert or not self.blocks[number - 1].is_expert
            groups.append(range(number if is_first else groups.pop().start, number + 1))
        return groups

    def tensors(self, number: int) -> dict[str, torch.Tensor]:
        """Return the tensors that the graph of a block's type reads, made from the block's weights.

        Raises:
            BundleError: a weight is missing from the files or not finite.
        """
        rows = self.head_rows[number - self.head_start] if number >= self.head_start else None
        block = self.blocks[number]
        frozen = self.block_types[self.type_of[number]].frozen
        weight_names = [name.removeprefix(WHOLE_PREFIX) for name in block.weights]
        read = [
            self.weights.iter_rows(name, ROWS_AT_ONCE)
            if position in frozen.tables
            else self._read(name, rows, block.is_expert)
            for position, name in enumerate(weight_names)
        ]
        names_in_model, rounded = self.weight_names(number), self.rounded(number)
        codes = {
            name: rounded[names_in_model.get(name, name)]
            for name in frozen.layers
            if names_in_model.get(name, name) in rounded
        }
        return dict(frozen.tensors(read, codes))

    def _read(self, name: str, rows: Sequence[int] | None, of_expert: bool) -> torch.Tensor:
        layer, _, part = name.rpartition(".")
        if part == ADAPTER_WEIGHT:
            return self.lora_a[layer]
        if of_expert and part.isdigit():
            return self.weights.read(layer, range(int(part), int(part) + 1))[0]
        return self.weights.read(name.replace(_BASE, "."), rows if layer == self.head else None)


def layer_name(weight: str) -> str:
    """Return the model's name of the layer that a block's weight belongs to."""
    return weight.removeprefix(WHOLE_PREFIX).replace(_BASE, ".").rpartition(".")[0]
