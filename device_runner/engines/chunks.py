"""Rows that are longer than a call: blocks compute them in chunks, each with the keys and values before it.

    forward    the first chunk first; its keys and values are the past of later chunks
    backward   the last chunk first; gradients of the past's keys and values go to earlier chunks

Recurrent states pass from each chunk to the next one, and their gradients to the previous one. In the forward
pass, chunks that rows have in common are computed once for each copy of the adapter.

Memory grows with the length of a row alone: later chunks are shorter because their tokens have more attention
scores. The past of a sliding window is the window. Keys and values that a block takes from another block
exist for all chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from device_runner.engines.blocks import Blocks
from prge.engine import Array, FloatArray
from prge.formats.chain import MASKED, MIN_TOKENS, SHARED_IN, SHARED_OUT, TABLE
from prge.formats.signatures import (
    CAUSAL_MASK,
    KEYS,
    PAST_KEYS,
    PAST_MASK,
    PAST_ONES,
    PAST_VALUES,
    PREFILL,
    PREFILL_BACKWARD,
    PREFILL_JVP,
    VALUES,
    Port,
)

Arrays = dict[str, Array]

_OF_TOKENS = (SHARED_IN, f"tangent_{SHARED_IN}", f"grad_{SHARED_OUT}")
_GRAD_NAMES = {value: Port(value).gradient.name for value in (KEYS, VALUES)}
_PAST_GRAD_NAMES = {KEYS: Port(PAST_KEYS).gradient.name, VALUES: Port(PAST_VALUES).gradient.name}


@dataclass(frozen=True)
class ComputedPrefix:
    """Outputs of a block for another row, whose first tokens and adapter are those of a row.

    Attributes:
        outputs: outputs of `Chunks.forward` for the other row.
        length: number of tokens of the other row.
        tokens: number of tokens that both rows begin with.
    """

    outputs: Arrays
    length: int
    tokens: int


class Chunks:
    """Runs blocks on one row in chunks, as `Blocks.run` does on rows that fit into a call.

    Args:
        blocks: blocks of a bundle with the chunk roles that are used.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._chain = blocks.chain

    def forward(self, number: int, inputs: Arrays, computed: ComputedPrefix | None = None) -> Arrays:
        """Compute the outputs of a block.

        Args:
            number: number of the block.
            inputs: `tokens` [1, 1, tokens] or `hidden_states` [1, 1, tokens, width], the adapter's matrices
                [1, rank, width], and shared inputs in the shape of the hidden states.
            computed: outputs of the block for a row that begins with the same tokens.

        Returns:
            `hidden_states` [1, tokens, width] and shared outputs, and what the backward pass needs: `keys`
            and `values` of attention [heads, tokens, width], and the recurrent states that entered each
            chunk, [chunks, height, width].
        """
        entering_name = "hidden_states" if number else "tokens"
        entering = inputs[entering_name][0]
        length = entering.shape[1]
        outputs = {"hidden_states": np.empty((1, length, self._blocks.width(number + 1)), np.float32)}
        for index, value in enumerate(self._chain.shared_out(number)):
            outputs[f"{SHARED_OUT}{index}"] = np.empty(
                (1, length, self._blocks.shared_width(value)), np.float32
            )
        own_keys = self._own_keys(number, length)
        shared_inputs = {name: array[0] for name, array in inputs.items() if name.startswith(SHARED_IN)}
        known = own_keys or self._taken_keys(number, shared_inputs)
        adapter = {**self._frozen(number), **inputs}
        recurrent = self._initial_recurrent_states(number)
        recurrent_inputs: list[Arrays] = []
        known_chunks = [] if recurrent or not computed else self._common_chunks(number, length, computed)
        for chunk in self._chunks(number, length):
            if computed and chunk in known_chunks:
                for name, full in (*outputs.items(), *own_keys.items()):
                    lead, width = full.shape[:-2], full.shape[-1]
                    full[..., chunk, :] = computed.outputs[name].reshape(*lead, -1, width)[..., chunk, :]
                continue
            chunk_inputs = {**adapter, **self.extra_inputs(number, chunk, known), **recurrent}
            chunk_inputs |= {name: _cut(array, chunk) for name, array in shared_inputs.items()}
            chunk_inputs[entering_name] = entering[:, chunk]
            chunk_outputs = self._blocks.run(number, PREFILL, chunk_inputs)
            recurrent_inputs.append(recurrent)
            recurrent = {name: chunk_outputs[name].copy() for name in recurrent}
            for name, full in (*outputs.items(), *own_keys.items()):
                full[..., chunk, :] = chunk_outputs[name]
            self._release(chunk_outputs)
        of_chunks = {name: np.concatenate([to[name] for to in recurrent_inputs]) for name in recurrent}
        return {**outputs, **own_keys, **of_chunks}

    def jvp(self, number: int, inputs: Arrays) -> Arrays:
        """Compute the outputs of a block and their tangents.

        Args:
            number: number of the block.
            inputs: `hidden_states` [1, tokens, width], `tangent_hidden_states` [queries, 1, tokens, width],
                shared inputs in these shapes, and the adapter's matrices and directions.

        Returns:
            `hidden_states` and `tangent_hidden_states`, and shared outputs with their tangents.
        """
        length, queries = inputs["hidden_states"].shape[1], len(inputs["tangent_hidden_states"])
        widths = {"hidden_states": self._blocks.width(number + 1)}
        for index, value in enumerate(self._chain.shared_out(number)):
            widths[f"{SHARED_OUT}{index}"] = self._blocks.shared_width(value)
        outputs: Arrays = {}
        for name, width in widths.items():
            outputs[name] = np.empty((1, length, width), np.float32)
            outputs[f"tangent_{name}"] = np.empty((queries, 1, length, width), np.float32)
        own_keys = self._own_keys(number, length)
        own_keys |= {
            f"tangent_{name}": np.empty((queries, *array.shape), np.float32)
            for name, array in own_keys.items()
        }
        known = own_keys or self._taken_keys(number, inputs)
        recurrent = self._initial_recurrent_states(number)
        recurrent |= {
            f"tangent_{name}": np.zeros((queries, *each.shape), np.float32)
            for name, each in recurrent.items()
        }
        of_tokens = {name: array for name, array in inputs.items() if _is_of_tokens(name)}
        for chunk in self._chunks(number, length):
            chunk_inputs = {**inputs, **self.extra_inputs(number, chunk, known), **recurrent}
            chunk_inputs |= {name: _cut(array, chunk) for name, array in of_tokens.items()}
            chunk_outputs = self._blocks.run(number, PREFILL_JVP, chunk_inputs)
            recurrent = {name: chunk_outputs[name].copy() for name in recurrent}
            for name, full in (*outputs.items(), *own_keys.items()):
                full[..., chunk, :] = chunk_outputs[name]
            self._release(chunk_outputs)
        return outputs

    def backward(self, number: int, inputs: Arrays) -> Arrays:
        """Compute the gradients of a block's inputs and adapter.

        Args:
            number: number of the block.
            inputs: `hidden_states` and `grad_hidden_states` [1, tokens, width], the outputs of `forward` that
                the backward pass needs, shared inputs and gradients of shared outputs in the same shape, and
                the adapter's matrices.

        Returns:
            `grad_hidden_states`, gradients of shared inputs, and gradients of the adapter's matrices.
        """
        state = inputs["hidden_states"]
        gradients: Arrays = {"grad_hidden_states": np.empty_like(state)}
        is_differentiable = self._chain.ports(number).shared_in
        for index in (index for index, changes in enumerate(is_differentiable) if changes):
            gradients[f"grad_{SHARED_IN}{index}"] = np.zeros_like(inputs[f"{SHARED_IN}{index}"])
        key_gradients = {name: np.zeros_like(inputs[name]) for name in (KEYS, VALUES) if name in inputs}
        shared_gradients = {name.removeprefix("grad_"): array for name, array in gradients.items()}
        known, past_gradients = (
            (inputs, key_gradients)
            if key_gradients
            else (self._taken_keys(number, arrays) for arrays in (inputs, shared_gradients))
        )
        of_tokens = {name: array for name, array in inputs.items() if _is_of_tokens(name)}
        of_tokens |= {
            grad_name: key_gradients[name] for name, grad_name in _GRAD_NAMES.items() if key_gradients
        }
        recurrent = self._initial_recurrent_states(number)
        recurrent_gradients = {f"grad_{name}": array for name, array in recurrent.items()}
        for index, chunk in reversed([*enumerate(self._chunks(number, state.shape[1]))]):
            chunk_inputs = {**inputs, **self.extra_inputs(number, chunk, known), **recurrent_gradients}
            chunk_inputs |= {name: inputs[name][index : index + 1] for name in recurrent}
            chunk_inputs |= {name: _cut(array, chunk) for name, array in of_tokens.items()}
            chunk_outputs = self._blocks.run(number, PREFILL_BACKWARD, chunk_inputs)
            recurrent_gradients = {name: chunk_outputs[name].copy() for name in recurrent_gradients}
            gradients["grad_hidden_states"][:, chunk] = chunk_outputs["grad_hidden_states"]
            past = slice(self._first_seen(number, chunk.start), chunk.start)
            size = past.stop - past.start
            for name, full in past_gradients.items():
                full[:, past] += chunk_outputs[_PAST_GRAD_NAMES[name]][:, -size:][:, :size]
            for name, array in chunk_outputs.items():
                if name.startswith("grad_lora"):
                    gradients[name] = gradients[name] + array if name in gradients else array.copy()
                elif name.startswith(f"grad_{SHARED_IN}"):
                    gradients[name][:, chunk] += array
            self._release(chunk_outputs)
        return gradients

    def checkpoint_sizes(self, number: int, length: int) -> list[int]:
        """Return the number of elements of each array that a backward pass needs next to hidden states."""
        heads, chunks = self._blocks.heads(number), len([*self._chunks(number, length)])
        computes_keys = not self._chain.blocks[number].past
        keys = [
            computes_keys * length * heads.count * width for width in (heads.key_width, heads.value_width)
        ]
        return [
            *keys,
            *(chunks * high * wide for high, wide in self._blocks.recurrent_states(number).values()),
        ]

    def _initial_recurrent_states(self, number: int) -> Arrays:
        """Return the recurrent states that enter the first chunk of a row."""
        shapes = self._blocks.recurrent_states(number)
        return {name: np.zeros((1, *shape), np.float32) for name, shape in shapes.items()}

    def _own_keys(self, number: int, length: int) -> Arrays:
        """Allocate keys and values of an attention that computes its own, [heads, tokens, width]."""
        if not self._chain.attends(number) or self._chain.blocks[number].past:
            return {}
        heads = self._blocks.heads(number)
        widths = {KEYS: heads.key_width, VALUES: heads.value_width}
        return {name: np.empty((heads.count, length, width), np.float32) for name, width in widths.items()}

    def _taken_keys(self, number: int, inputs: Arrays) -> Arrays:
        """Return keys and values that an attention takes as shared inputs, [heads, tokens, width].

        Their tangents have names that start with `tangent_`. Shared inputs are [1, tokens, heads x width].
        """
        outputs: Arrays = {}
        for name, index in zip((KEYS, VALUES), self._chain.blocks[number].past, strict=False):
            for prefix in ("", "tangent_"):
                if (array := inputs.get(f"{prefix}{SHARED_IN}{index}")) is not None:
                    outputs[f"{prefix}{name}"] = by_heads(
                        array[..., 0, :, :], self._blocks.heads(number).count
                    )
        return outputs

    def _common_chunks(self, number: int, length: int, computed: ComputedPrefix) -> list[slice]:
        """Return the chunks of a row that are the same chunks of the computed row."""
        chunks = [*self._chunks(number, computed.length)]
        return [
            chunk
            for chunk in self._chunks(number, length)
            if chunk in chunks and chunk.stop <= computed.tokens
        ]

    def _chunks(self, number: int, length: int) -> Iterator[slice]:
        mask = self._chain.causal_table(number)
        heads = self._blocks.heads(number).count * mask.members if mask else 0
        return self._chain.bounds.chunks(length, heads)

    def _first_seen(self, number: int, position: int) -> int:
        """Return the position of the first token that the token at a position attends to."""
        mask = self._chain.causal_table(number)
        return 0 if mask is None or mask.window is None else max(0, position - mask.window + 1)

    def _frozen(self, number: int) -> Arrays:
        """Return the bundle's frozen lora_A matrices of a block."""
        modules = [self._chain.modules[module].name for module in self._chain.blocks[number].modules]
        return {f"lora_a.{index}": self._blocks.lora_a[name][None] for index, name in enumerate(modules)}

    def extra_inputs(self, number: int, chunk: slice, known: Arrays) -> Arrays:
        """Return a block's inputs for a chunk besides hidden states and adapter: tables, masks, and the past.

        Args:
            number: number of the block.
            chunk: positions of the chunk's tokens in the row.
            known: `keys` and `values` [heads, tokens, width] of the row, which are read before the chunk;
                their tangents [queries, heads, tokens, width] have names that start with `tangent_`.
        """
        tables, size = self._blocks.tables, chunk.stop - chunk.start
        inputs: Arrays = {"ones": np.ones((1, size, 1), np.float32)}
        for index, table in enumerate(self._chain.blocks[number].tables):
            if self._chain.tables[table].type == "causal":
                # The mask between tokens of one chunk is the same wherever the chunk starts.
                inputs[CAUSAL_MASK] = tables.of(table, size).reshape(-1, size)
            else:
                inputs[f"{TABLE}{index}"] = tables.of(table, size, chunk.start)
        mask = self._chain.causal_table(number)
        if mask is None:
            return inputs
        first = self._first_seen(number, chunk.start)
        past = max(chunk.start - first, MIN_TOKENS)
        names = {PAST_KEYS: KEYS, PAST_VALUES: VALUES}
        names |= {
            f"tangent_{past}": f"tangent_{name}" for past, name in names.items() if f"tangent_{name}" in known
        }
        for past_name, name in names.items():
            *lead, _, width = known[name].shape
            array = inputs[past_name] = np.zeros((*lead, past, width), np.float32)
            array[..., past - (chunk.start - first) :, :] = known[name][..., first : chunk.start, :]
        inputs[PAST_ONES] = np.ones((1, past, 1), np.float32)
        mask_values = np.zeros((mask.members, size, past), np.float32)
        mask_values[..., : past - (chunk.start - first)] = MASKED
        if mask.window is not None:
            past_positions = np.arange(chunk.start - past, chunk.start)
            is_outside = np.arange(chunk.start, chunk.stop)[:, None] - past_positions >= mask.window
            mask_values[:, is_outside] = MASKED
        inputs[PAST_MASK] = mask_values.reshape(-1, past)
        return inputs

    def _release(self, values: Arrays) -> None:
        for array in values.values():
            self._blocks.release(array)


def by_heads(array: FloatArray, heads: int) -> FloatArray:
    """Reshape [..., tokens, heads x width] to [..., heads, tokens, width]."""
    return np.swapaxes(array.reshape(*array.shape[:-1], heads, -1), -2, -3)


def _is_of_tokens(name: str) -> bool:
    """Return whether an input has a row for each token."""
    return name in ("hidden_states", "tangent_hidden_states", "grad_hidden_states") or name.startswith(
        _OF_TOKENS
    )


def _cut(array: FloatArray, chunk: slice) -> FloatArray:
    return np.ascontiguousarray(array[..., chunk, :])
