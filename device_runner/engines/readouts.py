"""Readouts: outputs of a call from the last hidden states, and gradients of these states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from device_runner.engines.activations import ActivationStore
from device_runner.engines.batch import Arrays, Batch
from device_runner.engines.blocks import Blocks
from device_runner.engines.head import VocabularyHead
from device_runner.engines.planning import Layout, padded_length
from prge.engine import FloatArray, IntArray, TokenSequence
from prge.formats.chain import MASKED

GradOfOutputs = Callable[[FloatArray], FloatArray]


class Readout(ABC):
    """Computes outputs from the hidden states of a call's parts.

    Args:
        blocks: blocks of the bundle.
        sequences: sequences of the call.

    `layouts` are the layouts of the sequences, `lengths` their padded lengths, i64 [sequences].
    """

    def __init__(self, blocks: Blocks, sequences: Sequence[TokenSequence]) -> None:
        self._blocks = blocks
        self._sequences = sequences
        bounds = blocks.chain.bounds
        self.layouts = [
            Layout(padded_length(self._tokens_read(each), bounds), each.branches) for each in sequences
        ]
        self.lengths = np.array([layout.length for layout in self.layouts])

    @abstractmethod
    def _tokens_read(self, sequence: TokenSequence) -> int:
        """Return the number of leading tokens that the outputs of a sequence depend on."""

    def masks(self, rows: IntArray, length: int) -> Arrays:
        """Return attention masks of padded positions by input name, for sequences numbered by `rows`."""
        return {}

    @abstractmethod
    def empty(self, *lead: int) -> FloatArray:
        """Allocate the outputs of the call, f32 [*lead, ...]."""

    @abstractmethod
    def forward(self, parts: Sequence[Batch], outputs: FloatArray) -> None:
        """Write the outputs [copies, ...] of parts."""

    @abstractmethod
    def jvp(self, parts: Sequence[Batch], outputs: FloatArray, derivatives: FloatArray) -> None:
        """Write the outputs [...] of parts with one copy, and their derivatives [queries, ...]."""

    @abstractmethod
    def vjp(
        self, parts: Sequence[Batch], grad_fn: GradOfOutputs, store: ActivationStore
    ) -> tuple[FloatArray, list[FloatArray]]:
        """Return the outputs [...] of all parts, and gradients of their states [batch, length, width]."""


class LogProbabilities(Readout):
    """Readout of decoders: log-probabilities of targets, [..., targets]."""

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
        copies, numbers = self._target_numbers(parts)
        states = self._take_target_states(parts, "hidden_states")
        if len(numbers):
            outputs[copies, numbers] = self._head.forward(states, self._tokens[numbers]).logprobs

    def jvp(self, parts: Sequence[Batch], outputs: FloatArray, derivatives: FloatArray) -> None:
        """See Readout."""
        _, numbers = self._target_numbers(parts)
        states, tangents = (
            self._take_target_states(parts, "hidden_states"),
            self._take_target_states(parts, "tangent_hidden_states"),
        )
        if len(numbers):
            log_probs = self._head.forward(states, self._tokens[numbers], tangents)
            outputs[numbers], derivatives[:, numbers] = log_probs.logprobs, log_probs.tangents

    def vjp(
        self, parts: Sequence[Batch], grad_fn: GradOfOutputs, store: ActivationStore
    ) -> tuple[FloatArray, list[FloatArray]]:
        """See Readout."""
        _, numbers = self._target_numbers(parts)
        states, outputs = self._take_target_states(parts, "hidden_states"), self.empty()
        log_probs = self._head.forward(states, self._tokens[numbers], store=store)
        outputs[numbers] = log_probs.logprobs
        target_grads = self._head.backward(states, log_probs, grad_fn(outputs)[numbers], store)
        state_grads, start = [], 0
        for part in parts:
            grads = np.zeros((part.rows.size, part.length, target_grads.shape[-1]), np.float32)
            for row, number in enumerate(part.rows.ravel().tolist()):
                positions = self._positions[self._ends[number] : self._ends[number + 1]]
                np.add.at(grads[row], positions, target_grads[start : start + len(positions)])
                start += len(positions)
            state_grads.append(grads)
        return outputs, state_grads

    def _target_numbers(self, parts: Sequence[Batch]) -> tuple[IntArray, IntArray]:
        """Return copies and numbers of the targets of all rows of parts, one part after the other."""
        copies, numbers = [], []
        for part in parts:
            for (copy, _), number in np.ndenumerate(part.rows):
                row_numbers = np.arange(self._ends[number], self._ends[number + 1])
                numbers.append(row_numbers)
                copies.append(np.full(len(row_numbers), part.copy[copy]))
        return np.concatenate(copies), np.concatenate(numbers)

    def _take_target_states(self, parts: Sequence[Batch], name: str) -> FloatArray:
        """Take the hidden states at the targets of all rows out of parts, [..., targets, width]."""
        picked = []
        for part in parts:
            values = part.values.pop(name)
            # Tangents have an axis of queries before the rows.
            lead = values.shape[: 1 if name == "tangent_hidden_states" else 0]
            rows = values.reshape(*lead, part.rows.size, *values.shape[-2:])
            for row, number in enumerate(part.rows.ravel().tolist()):
                positions = self._positions[self._ends[number] : self._ends[number + 1]]
                picked.append(rows[..., row, positions, :])
            self._blocks.release(values)
        return np.concatenate(picked, -2)


class PooledStates(Readout):
    """Readout of encoders: one vector per sequence, [..., sequences, width]."""

    def _tokens_read(self, sequence: TokenSequence) -> int:
        return len(sequence.tokens)

    def masks(self, rows: IntArray, length: int) -> Arrays:
        """Return the mask added to attention scores, f32 [copies, batch, 1, 1, length]: 0 for tokens."""
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
            for (copy, column), number in np.ndenumerate(part.rows):
                pooled = self._pooled(states[copy, column], number)
                outputs[part.copy[copy], number] = pooled
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
        state_grads = []
        for part in parts:
            numbers = part.rows.ravel().tolist()
            row_grads = [self._share(number, part.length) * grads[number] for number in numbers]
            state_grads.append(np.stack(row_grads))
        return outputs, state_grads

    def _pooled(self, states: FloatArray, number: int) -> FloatArray:
        """Pool the hidden states [..., length, width] of a sequence to [..., width]."""
        if self._blocks.chain.pooling != "mean":
            return states[..., 0, :]
        mask = self._mask(number, states.shape[-2])
        # A sum over tokens keeps its order; a matrix product may change it with the shape.
        total: FloatArray = (mask * states).sum(-2) / mask.sum()
        return total

    def _mask(self, number: int, length: int) -> FloatArray:
        """Return 1 for tokens of a sequence and 0 for padding, f32 [length, 1]."""
        return (np.arange(length) < len(self._sequences[number].tokens)).astype(np.float32)[:, None]

    def _share(self, number: int, length: int) -> FloatArray:
        """Return the weight of each hidden state in a sequence's vector, f32 [length, 1]."""
        if self._blocks.chain.pooling == "mean":
            mask = self._mask(number, length)
            share: FloatArray = mask / mask.sum()
            return share
        return (np.arange(length) == 0).astype(np.float32)[:, None]
