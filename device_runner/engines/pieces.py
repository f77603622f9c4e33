"""Rows that are longer than a call: a block takes them in pieces, each with the keys and values before it.

    forward   the first piece first; its keys and values are the past of those behind it
    back      the last piece first; what it says of the past's keys and values is a slope of those before it

What a recurrence carries is handed on alike: of each piece to the next one, and its slope to the one before.

Memory grows with a row's length alone: later pieces are shorter, because their tokens have more scores. A
sliding window's past is the window.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from device_runner.engines.blocks import Blocks
from prge.engine import Array, FloatArray
from prge.files.chain import (
    CAUSAL,
    FEWEST_TOKENS,
    KEYS,
    MASKED,
    PAST_KEYS,
    PAST_ONES,
    PAST_VALUES,
    SEEN,
    SLOPE_KEYS,
    SLOPE_PAST_KEYS,
    SLOPE_PAST_VALUES,
    SLOPE_VALUES,
    TABLE,
    VALUES,
)
from prge.files.signatures import PREFILL, PREFILL_BACK, PREFILL_TANGENT

Arrays = dict[str, Array]


class Pieces:
    """One row through the blocks, as `Blocks.run` takes rows that fit into a call.

    Args:
        blocks: of a bundle with the roles for pieces that are asked for.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._chain = blocks.chain

    def stack(self, number: int, inputs: Arrays) -> Arrays:
        """A block's answer.

        Args:
            number: of the block.
            inputs: `tokens` [1, 1, tokens] or `state` [1, 1, tokens, width], and the adapter's
                [1, rank, width].

        Returns:
            `state` [1, tokens, width], and what a way back needs: of attention `keys` and `values`
            [heads, tokens, width], and what was `carried` to each piece, [pieces, height, width].
        """
        name = "state" if number else "tokens"
        entering = inputs[name][0]
        length = entering.shape[1]
        found = {"state": np.empty((1, length, self._blocks.width(number + 1)), np.float32)}
        attends = self._chain.attends(number)
        if attends:
            heads = self._blocks.heads(number)
            found[KEYS] = np.empty((heads.count, length, heads.key_width), np.float32)
            found[VALUES] = np.empty((heads.count, length, heads.value_width), np.float32)
        adapter = {**self._frozen(number), **inputs}
        carried = self._nothing_carried(number)
        carried_to: list[Arrays] = []
        for piece in self._pieces(number, length):
            given = {**adapter, **self.beside(number, piece, found), **carried}
            given[name] = entering[:, piece]
            answer = self._blocks.run(number, PREFILL, given)
            carried_to.append(carried)
            carried = {name: answer[name].copy() for name in carried}
            found["state"][:, piece] = answer["state"]
            if attends:
                found[KEYS][:, piece] = answer[KEYS]
                found[VALUES][:, piece] = answer[VALUES]
            self._release(answer)
        found |= {name: np.concatenate([each[name] for each in carried_to]) for name in carried}
        return found

    def tangent(self, number: int, inputs: Arrays) -> Arrays:
        """A block's answer and its tangents.

        Args:
            number: of the block.
            inputs: `state` [1, tokens, width], `d_state` [queries, 1, tokens, width], and the adapter's.

        Returns:
            `state` and `d_state`.
        """
        state, d_state = inputs["state"], inputs["d_state"]
        length, width = state.shape[1], self._blocks.width(number + 1)
        found: Arrays = {"state": np.empty((1, length, width), np.float32)}
        found["d_state"] = np.empty((len(d_state), 1, length, width), np.float32)
        known: Arrays = {}
        if self._chain.attends(number):
            heads = self._blocks.heads(number)
            for name, width in ((KEYS, heads.key_width), (VALUES, heads.value_width)):
                known[name] = np.empty((heads.count, length, width), np.float32)
                known[f"d_{name}"] = np.empty((len(d_state), heads.count, length, width), np.float32)
        carried = self._nothing_carried(number)
        carried |= {
            f"d_{name}": np.zeros((len(d_state), *each.shape), np.float32) for name, each in carried.items()
        }
        for piece in self._pieces(number, length):
            given = {**inputs, **self.beside(number, piece, known), **carried}
            given |= {"state": _cut(state, piece), "d_state": _cut(d_state, piece)}
            answer = self._blocks.run(number, PREFILL_TANGENT, given)
            carried = {name: answer[name].copy() for name in carried}
            for name, whole in (*found.items(), *known.items()):
                whole[..., piece, :] = answer[name]
            self._release(answer)
        return found

    def back(self, number: int, inputs: Arrays) -> Arrays:
        """A block's way back.

        Args:
            number: of the block.
            inputs: `state` and `slope` [1, tokens, width], what `stack` answered for it, and the adapter's.

        Returns:
            `slope` by the state and the adapter's gradients.
        """
        state, slope = inputs["state"], inputs["slope"]
        found: Arrays = {"slope": np.empty_like(state)}
        attends = self._chain.attends(number)
        by_keys, by_values = (np.zeros_like(inputs[name]) if attends else state for name in (KEYS, VALUES))
        carried = self._nothing_carried(number)
        by_carried = {f"slope_{name}": each for name, each in carried.items()}
        for place, piece in reversed([*enumerate(self._pieces(number, state.shape[1]))]):
            given = {**inputs, **self.beside(number, piece, inputs), **by_carried}
            given |= {name: inputs[name][place : place + 1] for name in carried}
            given |= {"state": _cut(state, piece), "slope": _cut(slope, piece)}
            if attends:
                given |= {SLOPE_KEYS: _cut(by_keys, piece), SLOPE_VALUES: _cut(by_values, piece)}
            answer = self._blocks.run(number, PREFILL_BACK, given)
            by_carried = {name: answer[name].copy() for name in by_carried}
            found["slope"][:, piece] = answer["slope"]
            if attends:
                past = slice(self._first_seen(number, piece.start), piece.start)
                known = past.stop - past.start
                by_keys[:, past] += answer[SLOPE_PAST_KEYS][:, -known:][:, :known]
                by_values[:, past] += answer[SLOPE_PAST_VALUES][:, -known:][:, :known]
            for name, array in answer.items():
                if name.startswith("gradient"):
                    found[name] = found[name] + array if name in found else array.copy()
            self._release(answer)
        return found

    def kept_numbers(self, number: int, length: int) -> list[int]:
        """Numbers of each thing that a way back needs of a row, beside its state."""
        heads, pieces = self._blocks.heads(number), len([*self._pieces(number, length)])
        keys = [length * heads.count * width for width in (heads.key_width, heads.value_width)]
        return [*keys, *(pieces * high * wide for high, wide in self._blocks.carried(number).values())]

    def _nothing_carried(self, number: int) -> Arrays:
        """What a block carries to its first piece."""
        shapes = self._blocks.carried(number)
        return {name: np.zeros((1, *shape), np.float32) for name, shape in shapes.items()}

    def _pieces(self, number: int, length: int) -> Iterator[slice]:
        mask = self._chain.causal_table(number)
        heads = self._blocks.heads(number).count * mask.members if mask else 0
        return self._chain.bounds.pieces(length, heads)

    def _first_seen(self, number: int, position: int) -> int:
        """The first token that one at this position looks at."""
        mask = self._chain.causal_table(number)
        return 0 if mask is None or mask.window is None else max(0, position - mask.window + 1)

    def _frozen(self, number: int) -> Arrays:
        """The bundle's own matrices before `lora_b`."""
        modules = [self._chain.modules[module].name for module in self._chain.blocks[number].modules]
        return {f"lora_a.{index}": self._blocks.lora_a[name][None] for index, name in enumerate(modules)}

    def beside(self, number: int, piece: slice, known: Arrays) -> Arrays:
        """What a block is given beside a piece's state and adapter: tables, masks, and the past.

        Args:
            number: of the block.
            piece: places of its tokens in the row.
            known: `keys` and `values` [heads, tokens, width] of a row, read before the piece,
                with `d_` before the name their tangents [queries, heads, tokens, width].
        """
        tables, size = self._blocks.tables, piece.stop - piece.start
        given: Arrays = {"ones": np.ones((1, size, 1), np.float32)}
        for index, table in enumerate(self._chain.blocks[number].tables):
            if self._chain.tables[table].kind == "causal":
                # What a piece's tokens see of each other is the same wherever it begins.
                given[CAUSAL] = tables.of(table, size).reshape(-1, size)
            else:
                given[f"{TABLE}{index}"] = tables.of(table, size, piece.start)
        mask = self._chain.causal_table(number)
        if mask is None:
            return given
        first = self._first_seen(number, piece.start)
        past = max(piece.start - first, FEWEST_TOKENS)
        names = {PAST_KEYS: KEYS, PAST_VALUES: VALUES}
        names |= {f"d_{past}": f"d_{name}" for past, name in names.items() if f"d_{name}" in known}
        for past_name, name in names.items():
            *lead, _, width = known[name].shape
            array = given[past_name] = np.zeros((*lead, past, width), np.float32)
            array[..., past - (piece.start - first) :, :] = known[name][..., first : piece.start, :]
        given[PAST_ONES] = np.ones((1, past, 1), np.float32)
        seen = np.zeros((mask.members, size, past), np.float32)
        seen[..., : past - (piece.start - first)] = MASKED
        if mask.window is not None:
            before = np.arange(piece.start - past, piece.start)
            behind = np.arange(piece.start, piece.stop)[:, None] - before >= mask.window
            seen[:, behind] = MASKED
        given[SEEN] = seen.reshape(-1, past)
        return given

    def _release(self, values: Arrays) -> None:
        for array in values.values():
            self._blocks.release(array)


def _cut(array: FloatArray, piece: slice) -> FloatArray:
    return np.ascontiguousarray(array[..., piece, :])
