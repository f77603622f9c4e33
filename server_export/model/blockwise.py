"""Rows that are computed through a chain block by block, and the inputs of its layers.

Every block computes the hidden states of all rows before the next block is read. So only one block's weights
are in memory, next to one hidden state per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from server_export.ir.block import InputObserver
from server_export.model.chain import ModelChain, layer_name
from server_export.model.eager import EagerBlock, run_experts
from server_export.progress import count_parts
from server_export.quantize.frozen import ADAPTER_WEIGHT
from server_export.trace.attention import padding_mask

# Tokens of a batch, padding included; a longer row is a batch of its own.
_TOKENS = 2048


class BlockwiseForward:
    """The hidden states of rows after some blocks of a chain, in PyTorch, of the model without an adapter.

    Args:
        chain: the chain, in float32.
        rows: the tokens of the rows, which are padded on the right.

    Attributes:
        states: the hidden states of each batch, f32 [rows, tokens, width]; before the first block its tokens,
            i64 [rows, tokens].
    """

    def __init__(self, chain: ModelChain, rows: Sequence[Sequence[int]]) -> None:
        self._chain = chain
        batches = [_padded(batch) for batch in _batches(rows)]
        self.states, self._masks = [tokens for tokens, _ in batches], [mask for _, mask in batches]
        self._shared = [dict[int, torch.Tensor]() for _ in batches]

    def outputs(self, block: EagerBlock, watch: InputObserver | None = None) -> Iterator[torch.Tensor]:
        """Yield the hidden states f32 [rows, tokens, width] of each batch after a block, without advancing.

        Args:
            block: the next block.
            watch: as in `EagerBlock.compute`, but called with inputs f32 [tokens, in] without padding.
        """
        for states, mask, shared in zip(self.states, self._masks, self._shared, strict=True):
            watch_unpadded = None if watch is None else partial(_without_padding, watch, mask)
            with torch.no_grad():
                hidden_states = block.compute(
                    states, padding_mask(mask.float()), watch=watch_unpadded, shared=shared
                )
            yield hidden_states

    def watch(self, block: EagerBlock, watch: InputObserver) -> None:
        """Call `watch` with the inputs of the next block's layers; see `outputs`."""
        for _ in self.outputs(block, watch):
            pass

    def advance(self, block: EagerBlock, watch: InputObserver | None = None) -> None:
        """Replace the hidden states by those after the next block; see `outputs`."""
        for batch, states in enumerate(self.outputs(block, watch)):
            self.states[batch] = states

    def advance_experts(
        self, experts: range, prepare: Callable[[EagerBlock, torch.Tensor], object] = lambda *given: None
    ) -> None:
        """Replace the hidden states by those after a layer's experts; see `run_experts`."""
        with torch.no_grad():
            self.states = run_experts(self._chain, experts, self.states, prepare)

    def tokens(self, states: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the hidden states f32 [tokens, width] of all batches, without padding."""
        return torch.cat([state[mask] for state, mask in zip(states, self._masks, strict=True)])


def _without_padding(
    watch: InputObserver, mask: torch.Tensor, names: Sequence[str], inputs: torch.Tensor
) -> None:
    watch(names, inputs[mask] if inputs.dim() == mask.dim() + 1 else inputs)


def watch_inputs(chain: ModelChain, rows: Sequence[Sequence[int]], watch: InputObserver) -> Iterator[None]:
    """Call `watch` with the inputs of a chain's adapted layers; yield after each group of blocks.

    Args:
        chain: the chain, in float32.
        rows: the tokens of the rows.
        watch: is called with the names of layers and their inputs f32 [tokens, in] without padding; layers
            with the same inputs share a call. It must not keep the inputs.

    Raises:
        BundleError: the files lack a weight, or it is not finite.
    """
    walk, count = BlockwiseForward(chain, rows), last_adapted(chain) + 1
    done = count_parts(count)
    for group in chain.block_groups(count):
        if chain.blocks[group.start].is_expert:
            walk.advance_experts(group)
        else:
            weight_names = chain.weight_names(group.start)

            def watch_adapted(
                weights: Sequence[str], inputs: torch.Tensor, weight_names: dict[str, str] = weight_names
            ) -> None:
                names = [weight_names.get(weight, "") for weight in weights]
                if layers := [layer_name(name) for name in names if name.endswith(f".{ADAPTER_WEIGHT}")]:
                    watch(layers, inputs)

            walk.advance(EagerBlock(chain, group.start), watch_adapted)
        done(len(group))
        yield


def last_adapted(chain: ModelChain) -> int:
    """Return the number of the last block with an adapter."""
    return max(number for number, block in enumerate(chain.blocks) if block.modules)


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yield batches of rows with similar lengths, of at most `_TOKENS` tokens."""
    batch: list[Sequence[int]] = []
    for row in sorted(rows, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > _TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded tokens i64 and their mask bool, [rows, longest]."""
    longest = max(map(len, rows))
    mask = torch.tensor([[position < len(row) for position in range(longest)] for row in rows])
    # The padding token is arbitrary: no other token attends to it.
    return torch.tensor([[*row, *[row[0]] * (longest - len(row))] for row in rows]), mask
