"""Rows that are longer than a call: a block takes them in chunks, each with the keys and values before it.

    forward   the first chunk first; its keys and values are the past of those behind it
    back      the last chunk first; what it says of the past's keys and values is a slope of those before it

What a recurrence carries is handed on alike: of each chunk to the next one, and its slope to the one before.

Memory grows with a row's length alone: later chunks are shorter, because their tokens have more scores. A
sliding window's past is the window. Keys and values that a block takes from another are there for all chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from device_runner.engines.blocks import Blocks
from prge.engine import Array, FloatArray
from prge.formats.chain import FEWEST_TOKENS, MASKED, SHARED_IN, SHARED_OUT, TABLE
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
_SLOPES = {value: Port(value).gradient.name for value in (KEYS, VALUES)}
_SLOPES_OF_PAST = {KEYS: Port(PAST_KEYS).gradient.name, VALUES: Port(PAST_VALUES).gradient.name}


class Chunks:
    """One row through the blocks, as `Blocks.run` takes rows that fit into a call.

    Args:
        blocks: of a bundle with the roles for chunks that are asked for.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._chain = blocks.chain

    def forward(self, number: int, inputs: Arrays) -> Arrays:
        """A block's answer.

        Args:
            number: of the block.
            inputs: `tokens` [1, 1, tokens] or `state` [1, 1, tokens, width], and the adapter's
                [1, rank, width]; what the block takes as the state.

        Returns:
            `state` [1, tokens, width] and what the block gives, and what a way back needs: of attention
            `keys` and `values` [heads, tokens, width], and what was `carried` to each chunk, [chunks, height,
            width].
        """
        name = "hidden_states" if number else "tokens"
        entering = inputs[name][0]
        length = entering.shape[1]
        found = {"hidden_states": np.empty((1, length, self._blocks.width(number + 1)), np.float32)}
        for place, value in enumerate(self._chain.shared_out(number)):
            found[f"{SHARED_OUT}{place}"] = np.empty(
                (1, length, self._blocks.shared_width(value)), np.float32
            )
        own = self._own_keys(number, length)
        taken = {each: array[0] for each, array in inputs.items() if each.startswith(SHARED_IN)}
        known = own or self._taken_keys(number, taken)
        adapter = {**self._frozen(number), **inputs}
        carried = self._initial_recurrent_states(number)
        carried_to: list[Arrays] = []
        for chunk in self._chunks(number, length):
            given = {**adapter, **self.extra_inputs(number, chunk, known), **carried}
            given |= {each: _cut(array, chunk) for each, array in taken.items()}
            given[name] = entering[:, chunk]
            answer = self._blocks.run(number, PREFILL, given)
            carried_to.append(carried)
            carried = {each: answer[each].copy() for each in carried}
            for each, whole in (*found.items(), *own.items()):
                whole[..., chunk, :] = answer[each]
            self._release(answer)
        of_chunks = {each: np.concatenate([to[each] for to in carried_to]) for each in carried}
        return {**found, **own, **of_chunks}

    def jvp(self, number: int, inputs: Arrays) -> Arrays:
        """A block's answer and its tangents.

        Args:
            number: of the block.
            inputs: `state` [1, tokens, width], `d_state` [queries, 1, tokens, width], what the block takes in
                their shapes, and the adapter's.

        Returns:
            `state` and `d_state`, and what the block gives.
        """
        length, queries = inputs["hidden_states"].shape[1], len(inputs["tangent_hidden_states"])
        widths = {"hidden_states": self._blocks.width(number + 1)}
        for place, value in enumerate(self._chain.shared_out(number)):
            widths[f"{SHARED_OUT}{place}"] = self._blocks.shared_width(value)
        found: Arrays = {}
        for name, width in widths.items():
            found[name] = np.empty((1, length, width), np.float32)
            found[f"tangent_{name}"] = np.empty((queries, 1, length, width), np.float32)
        own = self._own_keys(number, length)
        own |= {
            f"tangent_{name}": np.empty((queries, *array.shape), np.float32) for name, array in own.items()
        }
        known = own or self._taken_keys(number, inputs)
        carried = self._initial_recurrent_states(number)
        carried |= {
            f"tangent_{name}": np.zeros((queries, *each.shape), np.float32) for name, each in carried.items()
        }
        of_tokens = {name: array for name, array in inputs.items() if _is_of_tokens(name)}
        for chunk in self._chunks(number, length):
            given = {**inputs, **self.extra_inputs(number, chunk, known), **carried}
            given |= {name: _cut(array, chunk) for name, array in of_tokens.items()}
            answer = self._blocks.run(number, PREFILL_JVP, given)
            carried = {name: answer[name].copy() for name in carried}
            for name, whole in (*found.items(), *own.items()):
                whole[..., chunk, :] = answer[name]
            self._release(answer)
        return found

    def backward(self, number: int, inputs: Arrays) -> Arrays:
        """A block's way back.

        Args:
            number: of the block.
            inputs: `state` and `slope` [1, tokens, width], what `forward` returned for it, what the block takes
                and slopes of what it gives as the state, and the adapter's.

        Returns:
            `slope` by the state, those by what it takes, and the adapter's gradients.
        """
        state = inputs["hidden_states"]
        found: Arrays = {"grad_hidden_states": np.empty_like(state)}
        changes = self._chain.ports(number).shared_in
        for place in (place for place, each in enumerate(changes) if each):
            found[f"grad_{SHARED_IN}{place}"] = np.zeros_like(inputs[f"{SHARED_IN}{place}"])
        own = {name: np.zeros_like(inputs[name]) for name in (KEYS, VALUES) if name in inputs}
        slopes = {name.removeprefix("grad_"): array for name, array in found.items()}
        known, by_past = (
            (inputs, own) if own else (self._taken_keys(number, each) for each in (inputs, slopes))
        )
        of_tokens = {name: array for name, array in inputs.items() if _is_of_tokens(name)}
        of_tokens |= {slope: own[name] for name, slope in _SLOPES.items() if own}
        carried = self._initial_recurrent_states(number)
        by_carried = {f"grad_{name}": each for name, each in carried.items()}
        for turn, chunk in reversed([*enumerate(self._chunks(number, state.shape[1]))]):
            given = {**inputs, **self.extra_inputs(number, chunk, known), **by_carried}
            given |= {name: inputs[name][turn : turn + 1] for name in carried}
            given |= {name: _cut(array, chunk) for name, array in of_tokens.items()}
            answer = self._blocks.run(number, PREFILL_BACKWARD, given)
            by_carried = {name: answer[name].copy() for name in by_carried}
            found["grad_hidden_states"][:, chunk] = answer["grad_hidden_states"]
            past = slice(self._first_seen(number, chunk.start), chunk.start)
            size = past.stop - past.start
            for name, whole in by_past.items():
                whole[:, past] += answer[_SLOPES_OF_PAST[name]][:, -size:][:, :size]
            for name, array in answer.items():
                if name.startswith("grad_lora"):
                    found[name] = found[name] + array if name in found else array.copy()
                elif name.startswith(f"grad_{SHARED_IN}"):
                    found[name][:, chunk] += array
            self._release(answer)
        return found

    def checkpoint_sizes(self, number: int, length: int) -> list[int]:
        """Numbers of each thing that a way back needs of a row, beside its state."""
        heads, chunks = self._blocks.heads(number), len([*self._chunks(number, length)])
        is_own = not self._chain.blocks[number].past
        keys = [is_own * length * heads.count * width for width in (heads.key_width, heads.value_width)]
        return [
            *keys,
            *(chunks * high * wide for high, wide in self._blocks.recurrent_states(number).values()),
        ]

    def _initial_recurrent_states(self, number: int) -> Arrays:
        """What a block carries to its first chunk."""
        shapes = self._blocks.recurrent_states(number)
        return {name: np.zeros((1, *shape), np.float32) for name, shape in shapes.items()}

    def _own_keys(self, number: int, length: int) -> Arrays:
        """Room for keys and values of an attention that makes its own, [heads, tokens, width]."""
        if not self._chain.attends(number) or self._chain.blocks[number].past:
            return {}
        heads = self._blocks.heads(number)
        widths = {KEYS: heads.key_width, VALUES: heads.value_width}
        return {name: np.empty((heads.count, length, width), np.float32) for name, width in widths.items()}

    def _taken_keys(self, number: int, taken: Arrays) -> Arrays:
        """The same of one that takes them, of [1, tokens, heads x width]; with `tangent_` before the name their
        tangents."""
        found: Arrays = {}
        for name, place in zip((KEYS, VALUES), self._chain.blocks[number].past, strict=False):
            for prefix in ("", "tangent_"):
                if (array := taken.get(f"{prefix}{SHARED_IN}{place}")) is not None:
                    found[f"{prefix}{name}"] = by_heads(array[..., 0, :, :], self._blocks.heads(number).count)
        return found

    def _chunks(self, number: int, length: int) -> Iterator[slice]:
        mask = self._chain.causal_table(number)
        heads = self._blocks.heads(number).count * mask.members if mask else 0
        return self._chain.bounds.chunks(length, heads)

    def _first_seen(self, number: int, position: int) -> int:
        """The first token that one at this position looks at."""
        mask = self._chain.causal_table(number)
        return 0 if mask is None or mask.window is None else max(0, position - mask.window + 1)

    def _frozen(self, number: int) -> Arrays:
        """The bundle's own matrices before `lora_b`."""
        modules = [self._chain.modules[module].name for module in self._chain.blocks[number].modules]
        return {f"lora_a.{index}": self._blocks.lora_a[name][None] for index, name in enumerate(modules)}

    def extra_inputs(self, number: int, chunk: slice, known: Arrays) -> Arrays:
        """What a block is given beside a chunk's state and adapter: tables, masks, and the past.

        Args:
            number: of the block.
            chunk: places of its tokens in the row.
            known: `keys` and `values` [heads, tokens, width] of a row, read before the chunk,
                with `tangent_` before the name their tangents [queries, heads, tokens, width].
        """
        tables, size = self._blocks.tables, chunk.stop - chunk.start
        given: Arrays = {"ones": np.ones((1, size, 1), np.float32)}
        for index, table in enumerate(self._chain.blocks[number].tables):
            if self._chain.tables[table].type == "causal":
                # What a chunk's tokens see of each other is the same wherever it begins.
                given[CAUSAL_MASK] = tables.of(table, size).reshape(-1, size)
            else:
                given[f"{TABLE}{index}"] = tables.of(table, size, chunk.start)
        mask = self._chain.causal_table(number)
        if mask is None:
            return given
        first = self._first_seen(number, chunk.start)
        past = max(chunk.start - first, FEWEST_TOKENS)
        names = {PAST_KEYS: KEYS, PAST_VALUES: VALUES}
        names |= {
            f"tangent_{past}": f"tangent_{name}" for past, name in names.items() if f"tangent_{name}" in known
        }
        for past_name, name in names.items():
            *lead, _, width = known[name].shape
            array = given[past_name] = np.zeros((*lead, past, width), np.float32)
            array[..., past - (chunk.start - first) :, :] = known[name][..., first : chunk.start, :]
        given[PAST_ONES] = np.ones((1, past, 1), np.float32)
        seen = np.zeros((mask.members, size, past), np.float32)
        seen[..., : past - (chunk.start - first)] = MASKED
        if mask.window is not None:
            before = np.arange(chunk.start - past, chunk.start)
            behind = np.arange(chunk.start, chunk.stop)[:, None] - before >= mask.window
            seen[:, behind] = MASKED
        given[PAST_MASK] = seen.reshape(-1, past)
        return given

    def _release(self, values: Arrays) -> None:
        for array in values.values():
            self._blocks.release(array)


def by_heads(array: FloatArray, heads: int) -> FloatArray:
    """The same numbers [..., tokens, heads x width] as [..., heads, tokens, width]."""
    return np.swapaxes(array.reshape(*array.shape[:-1], heads, -1), -2, -3)


def _is_of_tokens(name: str) -> bool:
    """Whether an input has a row for each token."""
    return name in ("hidden_states", "tangent_hidden_states", "grad_hidden_states") or name.startswith(
        _OF_TOKENS
    )


def _cut(array: FloatArray, chunk: slice) -> FloatArray:
    return np.ascontiguousarray(array[..., chunk, :])
