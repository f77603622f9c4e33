"""One block of a chain in eager PyTorch, with its own weights, for inputs of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from prge.engine import FloatArray
from prge.formats.signatures import (
    HIDDEN_STATES,
    PADDING_MASK,
    SHARED_IN,
    SHIFT,
    TABLE,
    TARGETS,
    TOKENS,
    Port,
)
from prge.numerics.expert_routing import Routing
from server_export.ir.block import InputObserver
from server_export.model.chain import ModelChain


class EagerBlock:
    """A block of a chain with its weights.

    Args:
        chain: the chain, in float32.
        number: the number of the block.

    Attributes:
        tensors: the tensors of the block's graph by name; changing one changes what the block computes.

    Raises:
        BundleError: a weight is missing from the files or not finite.
    """

    def __init__(self, chain: ModelChain, number: int) -> None:
        self._chain, self.number = chain, number
        self._block = chain.block_types[chain.type_of[number]].block
        self.tensors = chain.tensors(number)

    def compute(
        self,
        state: torch.Tensor,
        extra_input: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
        adapter: Mapping[str, torch.Tensor] = MappingProxyType({}),
        watch: InputObserver | None = None,
        shared: dict[int, torch.Tensor] | None = None,
        operators: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    ) -> torch.Tensor:
        """Return the block's output hidden states f32 [rows, tokens, width]; for a head [rows, tokens, 2].

        Args:
            state: the block's input hidden states, or tokens i64 [rows, tokens].
            extra_input: an encoder's additive mask [rows, 1, 1, tokens], or a head's targets i64
                [rows, tokens].
            shift: a head's shift f32 [rows, tokens, 1].
            adapter: f32 [1, rank, width] by names of inputs; zeros by default.
            watch: as in `Block.call`; the names of weights are those of the block type's graph.
            shared: shared values f32 [rows, tokens, width] of these rows by number; the block reads some of
                them and adds others.
            operators: as in `Block.call`.
        """
        shared = {} if shared is None else shared
        block, (rows, length) = self._chain.blocks[self.number], state.shape[:2]

        def value(port: Port, node: Node) -> torch.Tensor:
            number = port.index or 0
            if port.is_adapter:
                name = f"{port.value}.{block.modules[number]}"
                return adapter.get(name, torch.zeros(1, *node.meta["val"].shape[1:]))
            if port.value == TABLE:
                return self._chain.tables.all[block.tables[number]].of(length)
            if port.value == SHARED_IN:
                return shared[block.shared_in[number]]
            tensor = {
                HIDDEN_STATES: state,
                TOKENS: state,
                PADDING_MASK: extra_input,
                TARGETS: extra_input,
                SHIFT: shift,
            }[port.value]
            assert tensor is not None
            return tensor

        inputs = {port.name: value(port, node) for port, node in self._block.inputs.items()}
        outputs = self._block.call(inputs, self.tensors, watch=watch, operators=operators)
        hidden_states, *tensor = (array.reshape(rows, length, -1) for array in outputs.values())
        shared |= dict(zip(block.shared_out, tensor, strict=True))
        return hidden_states


def run_experts(
    chain: ModelChain,
    experts: range,
    states: Sequence[torch.Tensor],
    prepare: Callable[[EagerBlock, torch.Tensor], object] = lambda expert, inputs: None,
) -> list[torch.Tensor]:
    """Return the output hidden states f32 [rows, tokens, width] of a layer's experts, run one at a time.

    Args:
        chain: the chain, in float32.
        experts: the numbers of the experts' blocks.
        states: the input hidden states of the experts.
        prepare: is called with each expert and its inputs f32 [1, tokens, in] before the expert computes.
    """
    first, after = (chain.hidden_widths(number) for number in (experts.start, experts.stop))
    flat = torch.cat([state.reshape(-1, state.shape[-1]) for state in states]).numpy()
    routing = Routing(flat.shape[-1], after[0], *first, len(experts))

    def run(expert: int, inputs: FloatArray) -> list[FloatArray]:
        block, states = EagerBlock(chain, experts.start + expert), torch.from_numpy(inputs)[None]
        prepare(block, states)
        return [block.compute(states)[0].numpy()]

    (combined,) = routing.forward(flat, run)
    parts = torch.from_numpy(combined).split([state.shape[0] * state.shape[1] for state in states])
    return [part.reshape(*state.shape[:2], -1) for part, state in zip(parts, states, strict=True)]
