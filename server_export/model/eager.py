"""One block of a chain in PyTorch, with its own weights, at the sizes of a call."""

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

    `tensors` are those of its graph by name; who changes one changes what the block computes.

    Args:
        chain: in float32.
        number: of the block.

    Raises:
        BundleError: the files lack a weight, or it isn't finite.
    """

    def __init__(self, chain: ModelChain, number: int) -> None:
        self._chain, self.number = chain, number
        self._block = chain.block_types[chain.type_of[number]].block
        self.tensors = chain.tensors(number)

    def compute(
        self,
        state: torch.Tensor,
        beside: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
        adapter: Mapping[str, torch.Tensor] = MappingProxyType({}),
        watch: InputObserver | None = None,
        shared: dict[int, torch.Tensor] | None = None,
        operators: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    ) -> torch.Tensor:
        """The state f32 [rows, tokens, width] after the block; of a head [rows, tokens, 2].

        Args:
            state: before it, or tokens i64 [rows, tokens].
            beside: an encoder's additive mask [rows, 1, 1, tokens], or targets i64 [rows, tokens] of a head.
            shift: f32 [rows, tokens, 1] of a head.
            adapter: f32 [1, rank, width] by names of inputs; zeros where there is none.
            watch: as `Block.call` takes it; the weights' names are those of the block type's graph.
            shared: values f32 [rows, tokens, width] of these rows by number; the block takes some of them and
                adds others.
            operators: as `Block.call` takes them.
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
            given = {
                HIDDEN_STATES: state,
                TOKENS: state,
                PADDING_MASK: beside,
                TARGETS: beside,
                SHIFT: shift,
            }[port.value]
            assert given is not None
            return given

        inputs = {port.name: value(port, node) for port, node in self._block.inputs.items()}
        found = self._block.call(inputs, self.tensors, watch=watch, operators=operators)
        answer, *given = (array.reshape(rows, length, -1) for array in found.values())
        shared |= dict(zip(block.shared_out, given, strict=True))
        return answer


def run_experts(
    chain: ModelChain,
    experts: range,
    states: Sequence[torch.Tensor],
    prepare: Callable[[EagerBlock, torch.Tensor], object] = lambda expert, given: None,
) -> list[torch.Tensor]:
    """States f32 [rows, tokens, width] behind the experts of a layer, with one in memory at a time.

    Args:
        chain: in float32.
        experts: their numbers.
        states: before them.
        prepare: takes each expert and what it is given, f32 [1, tokens, in], before it answers.
    """
    first, behind = (chain.hidden_widths(number) for number in (experts.start, experts.stop))
    flat = torch.cat([state.reshape(-1, state.shape[-1]) for state in states]).numpy()
    routing = Routing(flat.shape[-1], behind[0], *first, len(experts))

    def run(expert: int, given: FloatArray) -> list[FloatArray]:
        block, states = EagerBlock(chain, experts.start + expert), torch.from_numpy(given)[None]
        prepare(block, states)
        return [block.compute(states)[0].numpy()]

    (found,) = routing.forward(flat, run)
    parts = torch.from_numpy(found).split([state.shape[0] * state.shape[1] for state in states])
    return [part.reshape(*state.shape[:2], -1) for part, state in zip(parts, states, strict=True)]
