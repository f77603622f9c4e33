"""What a model's adapted layers see of some rows, computed block by block.

Every block runs over the states of all rows before the next one is read. So there is one block's weights in
memory, and one state of every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from server_export.model.attention import padding_mask
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock, Watch, through_experts
from server_export.stage import count_parts

# Tokens of a forward, padding included; a row of more has one of its own.
_TOKENS = 2048


def watch_inputs(chain: ModelChain, rows: Sequence[Sequence[int]], watch: Watch) -> Iterator[None]:
    """Run a chain in PyTorch, as the model is without an adapter; yields when a block has seen all rows.

    Args:
        chain: in float32.
        rows: their tokens; they are padded on the right.
        watch: is given f32 [tokens, in], what the layers of these names see, without padding; layers that
            see the same share a call. It must not keep them.

    Raises:
        BundleError: the files lack a weight, or it isn't finite.
    """
    batches = [_padded(batch) for batch in _batches(rows)]
    states, shared = [tokens for tokens, _ in batches], [dict[int, torch.Tensor]() for _ in batches]
    adapted = [number for number, block in enumerate(chain.blocks) if block.adapter]
    done = count_parts((adapted[-1] + 1) * len(batches))
    for turn in chain.turns(adapted[-1] + 1):
        if chain.blocks[turn.start].is_expert:
            with torch.no_grad():
                states = through_experts(chain, turn, states)
            done(len(turn) * len(batches))
            yield
            continue
        block = EagerBlock(chain, turn.start)
        for place, (_, mask) in enumerate(batches):

            def seen(names: Sequence[str], inputs: torch.Tensor, mask: torch.Tensor = mask) -> None:
                watch(names, inputs[mask])

            with torch.no_grad():
                states[place] = block.answer(
                    states[place], padding_mask(mask.float()), watch=seen, shared=shared[place]
                )
            done()
        yield


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
