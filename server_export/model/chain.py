"""A model as a chain of blocks, made of its configuration alone; weights are read when a block is written.

server_export/pipeline.py makes it.
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
    """Codes of a block where nothing was calibrated."""
    return {}


@dataclass(frozen=True)
class BlockType:
    """What all blocks of a type compute, in marker sizes, and how a block's weights become its tensors."""

    block: Block
    frozen: FrozenTensors


@dataclass
class ModelChain:
    """A model's blocks in order.

    Attributes:
        type_of: the number of each block's type in `block_types`.
        block_types: by the number of the first block of each.
        lora_a: frozen matrices f32 [rank, in] by adapted layer.
        head_rows: the rows of a head's tensors that each of its blocks has: a shard of the vocabulary.
        has_own_head: whether an encoder's states are what the last layer of its own head reads.
        rounded: codes of a block's int4 layers by the names of their weights; others are rounded as they are
            read.
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
        """Tokens that a decoder's head answers among."""
        return sum(map(len, self.head_rows))

    @property
    def head_start(self) -> int:
        """Number of the first block that answers no state."""
        return len(self.blocks) - len(self.head_rows)

    @property
    def shared(self) -> list[int]:
        """The number of the block that makes each shared value."""
        return [number for number, block in enumerate(self.blocks) for _ in block.shared_out]

    @property
    def is_decoder(self) -> bool:
        """Whether it has a head."""
        return bool(self.head_rows)

    @property
    def can_generate(self) -> bool:
        """Whether it has a head for the whole vocabulary."""
        return self.classes == self.vocabulary_size

    @property
    def quantization(self) -> QuantizationReport:
        """What is quantized and how."""
        if self.scheme == "fp32":
            return QuantizationReport()
        per_channel, embeddings = list[str](), list[str]()
        for number, kind in enumerate(self.type_of):
            frozen = self.block_types[kind].frozen
            own = self.weight_names(number)
            embeddings += frozen.embeddings
            if self.scheme == "8da4w":
                per_channel += [
                    layer_name(own.get(name, name)) for name, groups in frozen.layers.items() if not groups
                ]
        return QuantizationReport(
            self.scheme,
            GROUP_SIZE if self.scheme == "8da4w" else None,
            tuple(dict.fromkeys(per_channel)),
            "int8" if embeddings else "fp32",
        )

    def weight_names(self, number: int) -> dict[str, str]:
        """The names of a block's weights by those that its kind's graph has for them."""
        kind = self.blocks[self.type_of[number]]
        return dict(zip(kind.weights, self.blocks[number].weights, strict=True))

    def hidden_widths(self, number: int) -> tuple[int, int]:
        """Widths of what enters and leaves a block with a state."""
        block = self.blocks[number]
        entering, leaving = block.inputs[Port(HIDDEN_STATES)].meta["val"], block.value(block.outputs[0])
        return entering.shape[-1], leaving.shape[-1]

    def block_groups(self, count: int) -> list[range]:
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
        rows = self.head_rows[number - self.head_start] if number >= self.head_start else None
        block = self.blocks[number]
        frozen = self.block_types[self.type_of[number]].frozen
        names = [name.removeprefix(WHOLE_PREFIX) for name in block.weights]
        read = [
            self.weights.iter_rows(name, ROWS_AT_ONCE)
            if place in frozen.tables
            else self._read(name, rows, block.is_expert)
            for place, name in enumerate(names)
        ]
        own, rounded = self.weight_names(number), self.rounded(number)
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


def layer_name(weight: str) -> str:
    """The model's name of the layer that a block's weight belongs to."""
    return weight.removeprefix(WHOLE_PREFIX).replace(_BASE, ".").rpartition(".")[0]
