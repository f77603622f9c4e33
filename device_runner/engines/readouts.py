"""Outputs of a call from states behind the blocks, and the states' gradient from that of the outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from device_runner.engines.activations import ActivationStore
from device_runner.engines.batch import Arrays, Batch
from device_runner.engines.blocks import Blocks
from device_runner.engines.head import VocabularyHead
from device_runner.engines.planning import padded_length
from prge.engine import FloatArray, IntArray, TokenSequence
from prge.formats.chain import MASKED

GradOfOutputs = Callable[[FloatArray], FloatArray]


class Readout(ABC):
    """Reads the states of parts.

    Args:
        blocks: of the bundle.
        sequences: of the call.

    `lengths` are the tokens that each sequence is computed with, i64 [sequences].
    """

    def __init__(self, blocks: Blocks, sequences: Sequence[TokenSequence]) -> None:
        self._blocks = blocks
        self._sequences = sequences
        bounds = blocks.chain.bounds
        self.lengths = np.array([padded_length(self._tokens_read(each), bounds) for each in sequences])

    @abstractmethod
    def _tokens_read(self, sequence: TokenSequence) -> int:
        """The number of leading tokens that the outputs of a sequence depend on."""

    def masks(self, rows: IntArray, length: int) -> Arrays:
        """Attention masks of padded positions by input name, for sequences numbered by `rows`."""
        return {}

    @abstractmethod
    def empty(self, *lead: int) -> FloatArray:
        """Outputs of the call to be filled in, f32 [*lead, ...]."""

    @abstractmethod
    def forward(self, parts: Sequence[Batch], outputs: FloatArray) -> None:
        """Write the outputs [copies, ...] of parts."""

    @abstractmethod
    def jvp(self, parts: Sequence[Batch], outputs: FloatArray, derivatives: FloatArray) -> None:
        """Write the outputs [...] of parts of one copy, and their derivatives [queries, ...]."""

    @abstractmethod
    def vjp(
        self, parts: Sequence[Batch], grad_fn: GradOfOutputs, store: ActivationStore
    ) -> tuple[FloatArray, list[FloatArray]]:
        """The outputs [...] of all parts, and the gradient of each part's states [batch, length, width]."""


class LogProbabilities(Readout):
    """A decoder's: log-probabilities of targets, [..., targets]."""

    def __init__(self, blocks: Blocks, sequences: Sequence[TokenSequence]) -> None:
        super().__init__(blocks, sequences)
        self._head = VocabularyHead(blocks)
        counts = [len(sequence.targets) for sequence in sequences]
        self._ends = np.cumsum([0, *counts])
        targets = [target for sequence in sequences for target in sequence.targets]
        self._positions = np.array([target.position for target in targets], np.int64)
        self._tokens = np.array([target.token for target in targets], np.int64)

    def _tokens_read(self, sequence: TokenSequence) -> int:
        return 1 + max((target.position for target in sequence.targets), default=0)

    def empty(self, *lead: int) -> FloatArray:
        """See Readout."""
        return np.empty((*lead, len(self._tokens)), np.float32)

    def forward(self, parts: Sequence[Batch], outputs: FloatArray) -> None:
        """See Readout."""
        copies, asked = self._asked(parts)
        states = self._picked(parts, "hidden_states")
        if len(asked):
            outputs[copies, asked] = self._head.read(states, self._tokens[asked]).logprobs

    def jvp(self, parts: Sequence[Batch], outputs: FloatArray, derivatives: FloatArray) -> None:
        """See Readout."""
        _, asked = self._asked(parts)
        states, tangents = self._picked(parts, "hidden_states"), self._picked(parts, "tangent_hidden_states")
        if len(asked):
            reading = self._head.read(states, self._tokens[asked], tangents)
            outputs[asked], derivatives[:, asked] = reading.logprobs, reading.tangents

    def vjp(
        self, parts: Sequence[Batch], grad_fn: GradOfOutputs, store: ActivationStore
    ) -> tuple[FloatArray, list[FloatArray]]:
        """See Readout."""
        _, asked = self._asked(parts)
        states, outputs = self._picked(parts, "hidden_states"), self.empty()
        reading = self._head.read(states, self._tokens[asked], store=store)
        outputs[asked] = reading.logprobs
        picked = self._head.backward(states, reading, grad_fn(outputs)[asked], store)
        found, start = [], 0
        for part in parts:
            grads = np.zeros((part.rows.size, part.length, picked.shape[-1]), np.float32)
            for row, number in enumerate(part.rows.ravel().tolist()):
                positions = self._positions[self._ends[number] : self._ends[number + 1]]
                np.add.at(grads[row], positions, picked[start : start + len(positions)])
                start += len(positions)
            found.append(grads)
        return outputs, found

    def _asked(self, parts: Sequence[Batch]) -> tuple[IntArray, IntArray]:
        """Copies and numbers of the targets of all rows of parts, one part after the other."""
        copies, asked = [], []
        for part in parts:
            for (place, _), number in np.ndenumerate(part.rows):
                of_row = np.arange(self._ends[number], self._ends[number + 1])
                asked.append(of_row)
                copies.append(np.full(len(of_row), part.copy[place]))
        return np.concatenate(copies), np.concatenate(asked)

    def _picked(self, parts: Sequence[Batch], name: str) -> FloatArray:
        """States at the targets of all rows of parts, [..., targets, width]; the parts lose theirs."""
        picked = []
        for part in parts:
            values = part.values.pop(name)
            # Rows are the axes before tokens and width; what is before them are queries.
            lead = values.shape[: 1 if name == "tangent_hidden_states" else 0]
            rows = values.reshape(*lead, part.rows.size, *values.shape[-2:])
            for row, number in enumerate(part.rows.ravel().tolist()):
                positions = self._positions[self._ends[number] : self._ends[number + 1]]
                picked.append(rows[..., row, positions, :])
            self._blocks.release(values)
        return np.concatenate(picked, -2)


class PooledStates(Readout):
    """An encoder's: one vector for each sequence, [..., sequences, width]."""

    def _tokens_read(self, sequence: TokenSequence) -> int:
        return len(sequence.tokens)

    def masks(self, rows: IntArray, length: int) -> Arrays:
        """What attention adds to the scores of keys, f32 [copies, batch, 1, 1, length]: 0 for a token."""
        counts = [len(self._sequences[number].tokens) for number in rows.ravel().tolist()]
        ends = np.array(counts).reshape(*rows.shape, 1, 1, 1)
        return {"padding_mask": np.where(np.arange(length) < ends, np.float32(0), np.float32(MASKED))}

    def empty(self, *lead: int) -> FloatArray:
        """See Readout."""
        width = self._blocks.chain.width
        return np.empty((*lead, len(self._sequences), width), np.float32)

    def forward(self, parts: Sequence[Batch], outputs: FloatArray) -> None:
        """See Readout."""
        for part in parts:
            states = part.values.pop("hidden_states")
            for (place, column), number in np.ndenumerate(part.rows):
                pooled = self._pooled(states[place, column], number)
                outputs[part.copy[place], number] = pooled
            self._blocks.release(states)

    def jvp(self, parts: Sequence[Batch], outputs: FloatArray, derivatives: FloatArray) -> None:
        """See Readout."""
        for part in parts:
            states, tangents = part.values.pop("hidden_states"), part.values.pop("tangent_hidden_states")
            for row, number in enumerate(part.rows.ravel().tolist()):
                outputs[number] = self._pooled(states[row], number)
                derivatives[:, number] = self._pooled(tangents[:, row], number)
            self._blocks.release(states)
            self._blocks.release(tangents)

    def vjp(
        self, parts: Sequence[Batch], grad_fn: GradOfOutputs, store: ActivationStore
    ) -> tuple[FloatArray, list[FloatArray]]:
        """See Readout."""
        outputs = self.empty()
        self.forward(parts, outputs[None])
        grads = grad_fn(outputs)
        found = []
        for part in parts:
            numbers = part.rows.ravel().tolist()
            of_rows = [self._share(number, part.length) * grads[number] for number in numbers]
            found.append(np.stack(of_rows))
        return outputs, found

    def _pooled(self, states: FloatArray, number: int) -> FloatArray:
        """Of states [..., length, width] of a sequence, [..., width]."""
        if self._blocks.chain.pooling != "mean":
            return states[..., 0, :]
        mask = self._mask(number, states.shape[-2])
        # Added up token by token: a matrix product may add in another order for another shape.
        total: FloatArray = (mask * states).sum(-2) / mask.sum()
        return total

    def _mask(self, number: int, length: int) -> FloatArray:
        """1 for a token of a sequence and 0 for padding, f32 [length, 1]."""
        return (np.arange(length) < len(self._sequences[number].tokens)).astype(np.float32)[:, None]

    def _share(self, number: int, length: int) -> FloatArray:
        """How much of each state a sequence's vector has, f32 [length, 1]."""
        if self._blocks.chain.pooling == "mean":
            mask = self._mask(number, length)
            share: FloatArray = mask / mask.sum()
            return share
        return (np.arange(length) == 0).astype(np.float32)[:, None]
