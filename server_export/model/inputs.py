"""Rows on their way through a chain, block by block, and what its layers see of them.

Every block runs over the states of all rows before the next one is read. So there is one block's weights in
memory, and one state of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from server_export.ir.block import Watch
from server_export.model.chain import ModelChain, layer_of
from server_export.model.eager import EagerBlock, through_experts
from server_export.quantize.frozen import ADAPTER_WEIGHT
from server_export.stage import count_parts
from server_export.trace.attention import padding_mask

# Tokens of a forward, padding included; a row of more has one of its own.
_TOKENS = 2048


class Walk:
    """States of some rows on their way through a chain, in PyTorch, as the model is without an adapter.

    Args:
        chain: in float32.
        rows: their tokens; they are padded on the right.

    Attributes:
        states: of each batch, f32 [rows, tokens, width]; its tokens, i64 [rows, tokens], at first.
    """

    def __init__(self, chain: ModelChain, rows: Sequence[Sequence[int]]) -> None:
        self._chain = chain
        batches = [_padded(batch) for batch in _batches(rows)]
        self.states, self._masks = [tokens for tokens, _ in batches], [mask for _, mask in batches]
        self._shared = [dict[int, torch.Tensor]() for _ in batches]

    def answers(self, block: EagerBlock, watch: Watch | None = None) -> Iterator[torch.Tensor]:
        """The states f32 [rows, tokens, width] of each batch after a block.

        Args:
            block: the next one.
            watch: as `EagerBlock.answer` takes it, but for tokens alone: f32 [tokens, in] without padding.
        """
        for states, mask, shared in zip(self.states, self._masks, self._shared, strict=True):
            seen = None if watch is None else partial(_without_padding, watch, mask)
            with torch.no_grad():
                answer = block.answer(states, padding_mask(mask.float()), watch=seen, shared=shared)
            yield answer

    def watch(self, block: EagerBlock, watch: Watch) -> None:
        """Give what the layers of the next block see; see `answers`."""
        for _ in self.answers(block, watch):
            pass

    def advance(self, block: EagerBlock, watch: Watch | None = None) -> None:
        """Go on to behind the next block; see `answers`."""
        for place, states in enumerate(self.answers(block, watch)):
            self.states[place] = states

    def advance_experts(
        self, experts: range, prepare: Callable[[EagerBlock, torch.Tensor], object] = lambda *given: None
    ) -> None:
        """Go on to behind the experts of a layer; see `through_experts`."""
        with torch.no_grad():
            self.states = through_experts(self._chain, experts, self.states, prepare)

    def tokens(self, states: Iterable[torch.Tensor]) -> torch.Tensor:
        """The states f32 [tokens, width] of all batches, without padding."""
        return torch.cat([state[mask] for state, mask in zip(states, self._masks, strict=True)])


def _without_padding(watch: Watch, mask: torch.Tensor, names: Sequence[str], inputs: torch.Tensor) -> None:
    watch(names, inputs[mask] if inputs.dim() == mask.dim() + 1 else inputs)


def watch_inputs(chain: ModelChain, rows: Sequence[Sequence[int]], watch: Watch) -> Iterator[None]:
    """Give what a chain's adapted layers see of some rows; yields when a block has seen all of them.

    Args:
        chain: in float32.
        rows: their tokens.
        watch: is given f32 [tokens, in], what the layers of these names see, without padding; layers that
            see the same share a call. It must not keep them.

    Raises:
        BundleError: the files lack a weight, or it isn't finite.
    """
    walk, count = Walk(chain, rows), last_adapted(chain) + 1
    done = count_parts(count)
    for turn in chain.turns(count):
        if chain.blocks[turn.start].is_expert:
            walk.advance_experts(turn)
        else:
            own = chain.own_names(turn.start)

            def seen(weights: Sequence[str], inputs: torch.Tensor, own: dict[str, str] = own) -> None:
                names = [own.get(weight, "") for weight in weights]
                if layers := [layer_of(name) for name in names if name.endswith(f".{ADAPTER_WEIGHT}")]:
                    watch(layers, inputs)

            walk.advance(EagerBlock(chain, turn.start), seen)
        done(len(turn))
        yield


def last_adapted(chain: ModelChain) -> int:
    """Number of the last block with an adapter."""
    return max(number for number, block in enumerate(chain.blocks) if block.modules)


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Rows of about one length together, of no more than `_TOKENS` tokens."""
    batch: list[Sequence[int]] = []
    for row in sorted(rows, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > _TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens i64 and mask bool, [rows, longest]."""
    longest = max(map(len, rows))
    mask = torch.tensor([[place < len(row) for place in range(longest)] for row in rows])
    # Any token does as padding: no other one sees it.
    return torch.tensor([[*row, *[row[0]] * (longest - len(row))] for row in rows]), mask
