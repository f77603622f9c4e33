"""A chain in PyTorch as an engine: what it answers, and the exact gradient, block by block.

The weights of one block are in memory, and the states that entered the blocks of the call's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from prge.contract import GRADIENT_PREFIX, Contract
from prge.engine import Array, FloatArray, IntArray
from prge.exact import answer_slopes
from prge.vocabulary import Reading
from server_export.model.attention import padding_mask
from server_export.model.chain import Chain
from server_export.model.eager import EagerBlock
from server_export.model.readout import at_positions, pooling_of

# Positions that are asked of a head at once: each has a row of logits.
_ASKED = 256


class EagerEngine:
    """Implements prge.engine.Engine for stack calls of one copy, and for exact calls.

    Args:
        chain: in float32.
        contract: of the calls; `sequence_length` is what their rows have.
        pooling: of an encoder's states.
    """

    def __init__(self, chain: Chain, contract: Contract, pooling: str) -> None:
        self._chain = chain
        self._contract = contract
        self._pool = pooling_of(pooling)

    @property
    def contract(self) -> Contract:
        """Of a call."""
        return self._contract

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See prge.engine.Engine.

        Raises:
            BundleError: the files lack a weight, or it isn't finite.
        """
        lora_b = {
            module.name: torch.from_numpy(inputs[module.input_name]).reshape(
                1, module.rank, module.out_features
            )
            for module in self._contract.modules
        }
        mask = torch.ones(inputs["tokens"].shape)
        if self._contract.is_encoder:
            mask = torch.from_numpy(inputs["attention_mask"]).float()
        entered: list[torch.Tensor] = []
        state = torch.from_numpy(inputs["tokens"])
        with torch.no_grad():
            for number in range(self._chain.end):
                entered.append(state)
                state = EagerBlock(self._chain, number).answer(state, padding_mask(mask), lora_b=lora_b)
        if self._contract.is_encoder:
            answers, slope = self._pooled(state, mask, inputs)
        else:
            answers, slope = self._read(state, inputs)
        name = "pooled" if self._contract.is_encoder else "logprobs"
        if not self._contract.is_exact:
            return {name: answers}
        return {name: answers, **self._back(entered, padding_mask(mask), slope, lora_b)}

    def _back(
        self,
        entered: list[torch.Tensor],
        beside: torch.Tensor,
        slope: torch.Tensor,
        lora_b: Mapping[str, torch.Tensor],
    ) -> dict[str, Array]:
        """Gradients by their names, from the slope of the state that the blocks answered."""
        gradients: dict[str, Array] = {}
        lowest = min(number for number, block in enumerate(self._chain.blocks) if block.adapter)
        for number in reversed(range(lowest, self._chain.end)):
            names = [self._chain.adapter[name] for name in self._chain.blocks[number].adapter]
            own = {name: lora_b[name].detach().requires_grad_() for name in names}
            state = entered.pop().detach().requires_grad_()
            with torch.enable_grad():
                answer = EagerBlock(self._chain, number).answer(state, beside, lora_b=own)
                slope, *found = torch.autograd.grad(answer, [state, *own.values()], slope)
            gradients |= {
                GRADIENT_PREFIX + name: each[0].numpy() for name, each in zip(names, found, strict=True)
            }
        return gradients

    def _pooled(
        self, state: torch.Tensor, mask: torch.Tensor, inputs: Mapping[str, Array]
    ) -> tuple[FloatArray, torch.Tensor]:
        """An encoder's answers, and the slope of its states."""
        state = state.detach().requires_grad_()
        with torch.enable_grad():
            pooled = self._pool(state, mask)
        answers: FloatArray = pooled.detach().numpy()
        if not self._contract.is_exact:
            return answers, state
        slopes = torch.from_numpy(answer_slopes(self._contract, answers, inputs))
        return answers, torch.autograd.grad(pooled, state, slopes)[0]

    def _read(self, state: torch.Tensor, inputs: Mapping[str, Array]) -> tuple[FloatArray, torch.Tensor]:
        """A decoder's answers, and the slope of its states."""
        positions = torch.from_numpy(inputs["positions"])
        asked = at_positions(state, positions).flatten(0, 1)
        reading = Reading(inputs["targets"].ravel(), len(self._chain.head_rows[0]))
        for piece, block, mine in self._pieces(len(asked)):
            within = reading.within(piece, mine)[0]

            def parts(
                shift: FloatArray,
                block: EagerBlock = block,
                mine: slice = mine,
                within: IntArray = within,
            ) -> tuple[FloatArray, None]:
                with torch.no_grad():
                    return _parts(block, asked[mine], within, shift).numpy(), None

            reading.add(piece, mine, *reading.ask(mine, parts))
        answers = reading.logprobs.reshape(inputs["positions"].shape)
        if not self._contract.is_exact:
            return answers, state
        slopes = answer_slopes(self._contract, answers, inputs).ravel()
        by_asked = torch.zeros_like(asked)
        for piece, block, mine in self._pieces(len(asked)):
            within, has = reading.within(piece, mine)
            own = asked[mine].detach().requires_grad_()
            # With the logarithm of the whole sum as the shift, the sum of exponentials is 1.
            shift = reading.log_total[mine].astype(np.float32)
            slope = torch.from_numpy(np.stack([slopes[mine] * has, -slopes[mine]], -1))
            with torch.enable_grad():
                by_asked[mine] += torch.autograd.grad(_parts(block, own, within, shift), own, slope)[0]
        starts = torch.arange(len(state))[:, None] * state.shape[1]
        by_state = torch.zeros_like(state).flatten(0, 1)
        by_state.index_add_(0, (positions + starts).ravel(), by_asked)
        return answers, by_state.reshape(state.shape)

    def _pieces(self, count: int) -> Iterator[tuple[int, EagerBlock, slice]]:
        """Pieces of the vocabulary, each with some positions after the others."""
        for piece in range(len(self._chain.head_rows)):
            block = EagerBlock(self._chain, self._chain.end + piece)
            for start in range(0, count, _ASKED):
                yield piece, block, slice(start, min(start + _ASKED, count))


def _parts(block: EagerBlock, states: torch.Tensor, targets: IntArray, shift: FloatArray) -> torch.Tensor:
    """What a piece answers of states [asked, width]: f32 [asked, 2]."""
    shifts = torch.from_numpy(shift)[None, :, None]
    return block.answer(states[None], torch.from_numpy(targets)[None], shifts)[0]
