"""The chain of a bundle's blocks as one engine: a call goes through all of them, and back.

    tokens -> embedding -> blocks -> states at the asked positions -> head -> logprobs
    slope of logprobs -> head -> slope of states -> blocks, the last one first -> gradient

A call runs in parts, each of rows of one padded length (planning.py), and all parts pass a block before the
next block is loaded. What no adapter changes is computed once for all copies. A row that is longer than the
bundle's pieces is a part of its own, which passes each block in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from device_runner.engines.base import CheckedEngine
from device_runner.engines.blocks import Blocks
from device_runner.engines.experts import Experts
from device_runner.engines.head import Asked, VocabularyHead
from device_runner.engines.kept_states import KeptStates
from device_runner.engines.pieces import Pieces
from device_runner.engines.planning import (
    copies_together,
    groups,
    groups_of_one_adapter,
    padded_length,
    slices,
)
from device_runner.engines.saved_values import SavedValues, read, written
from device_runner.engines.shared_values import SharedValues, beside, parted
from device_runner.engines.trunk_cache import TrunkCache
from prge.contract import Contract, Matrix, matrices
from prge.engine import Array, FloatArray, IntArray
from prge.files.chain import GIVEN, KEYS, MASKED, TABLE, VALUES, Bounds
from prge.files.signatures import BACK, BACK_SAVED, SAVE, STACK, TANGENT

Arrays = dict[str, Array]


@dataclass
class Part:
    """Rows that pass the blocks together.

    Attributes:
        rows: their numbers in the call, [copies, batch] or [batch].
        values: the state by name, in the shape that blocks take.
        beside: what every block is given beside it.
        adapter: the call's inputs of adapted modules for this part, by their names in the call; one copy may
            stand for all copies and rows.
        kept: of a way back, the states that entered the blocks, and of a row in pieces what it needs besides.
        shared: values that several blocks read.
    """

    rows: IntArray
    values: Arrays
    beside: Arrays
    shared: SharedValues
    adapter: Arrays = field(default_factory=dict)
    kept: list[Arrays] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of its rows, with padding."""
        return int(self.beside["ones"].shape[1])

    def of_one_copy(self, values: Arrays) -> Part:
        """The same rows without the axis of copies, with values that lack it."""
        beside = {name: array[0] if name == "padding" else array for name, array in self.beside.items()}
        return Part(self.rows, values, beside, self.shared.of_one_copy(), self.adapter, self.kept)


class ChainEngine(CheckedEngine):
    """Implements prge.engine.Engine for a contract of a run's own choice.

    Args:
        contract: see prge.files.chain.Chain.contract.
        blocks: of the bundle.
        threads: size of the engine's pool.
        cache: keeps the states that enter the lowest adapted block, row by row.
        kept: keeps the states that enter the blocks of an exact call.
        saved: what its forward passes save for the way back; without it all is computed again.
    """

    def __init__(
        self,
        contract: Contract,
        blocks: Blocks,
        threads: int,
        cache: TrunkCache | None = None,
        kept: KeptStates | None = None,
        saved: SavedValues | None = None,
    ) -> None:
        super().__init__(contract, threads)
        self._cache = cache
        self._saved = saved
        self._kept = kept or KeptStates()
        self._blocks = blocks
        self._chain = blocks.chain
        self._bounds = blocks.chain.bounds
        self._first = blocks.chain.lowest_adapted
        self._end = blocks.chain.end
        self._head = VocabularyHead(blocks)
        self._pieces = Pieces(blocks)
        self._experts = Experts(blocks)
        # Shared values that enter the lowest adapted block, and their widths.
        self._entering = blocks.chain.shared_at(self._first)
        self._widths = [blocks.shared_width(value) for value in self._entering]

    def _call(self, inputs: Arrays) -> Sequence[Array]:
        call = _Call(inputs, self._contract, self._bounds)
        return self._tangent(call) if self._contract.is_tangent else [self._stack(call)]

    def _stack(self, call: _Call) -> Array:
        """Answers of all copies."""
        copies, batch = self._contract.copies, self._contract.batch_size
        numbers = np.arange(copies * batch).reshape(copies, batch)
        if copies == 1:
            parts = self._parts_of_one_copy(call, numbers[0], call.adapter)
        else:
            is_equal = call.has_equal_copies
            below = self._below(call, numbers[:1] if is_equal else numbers)
            parts = [
                self._part(call, numbers[mine, rows], below, {n: a[mine] for n, a in call.adapter.items()})
                for alike in slices(copies, copies if is_equal else 1)
                for rows, together in self._groups(call, numbers[alike.start])
                for mine in slices(alike.stop, together, alike.start)
            ]
        self._pass(parts, STACK, range(self._first, self._end))
        return self._answer(call, self._collected(parts, call))

    def _tangent(self, call: _Call) -> list[Array]:
        """Answers of all rows, and their tangents."""
        queries, rows = self._contract.queries, self._contract.batch_size
        below = self._below(call, np.arange(rows)[None])
        states, tangents = None, None
        directions = {name for each in matrices(self._contract.modules) for name in (each.u, each.v)}
        for mine in slices(queries, self._bounds.queries):
            parts = []
            for batch, _ in self._groups(call, np.arange(rows)):
                adapter = {
                    name: np.ascontiguousarray(array[mine][:, batch]) if name in directions else array
                    for name, array in call.adapter.items()
                }
                part = self._part(call, np.arange(rows)[batch], below, adapter)
                state = part.values["state"]
                part.values["d_state"] = np.zeros((mine.stop - mine.start, *state.shape), np.float32)
                parts.append(part)
            self._pass(parts, TANGENT, range(self._first, self._end))
            if tangents is None:
                states = self._collected(parts, call)
                tangents = np.zeros((queries, *states.shape), np.float32)
            for part in parts:
                tangents[mine, part.rows, : part.length] = part.values["d_state"]
                self._release(part.values)
        assert states is not None and tangents is not None
        if self._chain.is_encoder:
            return [call.pooled(each, self._chain.pooling) for each in (states, tangents)]
        reading = self._head.read(call.asked, states, tangents)
        return [call.asked.told(reading.logprobs), call.asked.told(reading.changes)]

    def _back(
        self, inputs: Arrays, slope: Callable[[FloatArray], FloatArray]
    ) -> tuple[FloatArray, dict[str, FloatArray]]:
        call = _Call(inputs, self._contract, self._bounds)
        rows = np.arange(self._contract.batch_size)
        below = self._below(call, rows[None])
        stacked = {name: array[None] for name, array in call.adapter.items()}
        parts = [self._part(call, rows[None, batch], below, stacked) for batch, _ in self._groups(call, rows)]
        above = range(self._first, self._end)
        self._make_room_to_keep(parts, above)
        if self._saved is not None:
            asked = 0 if self._chain.is_encoder else call.asked.count
            # A row in pieces saves nothing.
            whole = [(part.rows.size, 0 if self._in_pieces(part) else part.length) for part in parts]
            self._saved.begin(whole, asked)
        self._pass(parts, STACK, above, keep=True)
        states = self._collected(parts, call)
        if self._chain.is_encoder:
            answers = call.pooled(states, self._chain.pooling)
            by_state = call.slope_of_pooled(slope(answers), self._chain.pooling)
        else:
            reading = self._head.read(call.asked, states, saved=self._saved)
            answers = call.asked.told(reading.logprobs)
            slopes = call.asked.gathered(slope(answers))
            by_state = self._head.back(call.asked, states, reading, slopes, self._saved)
        parts = [
            part.of_one_copy({"slope": np.ascontiguousarray(by_state[part.rows[0], : part.length])})
            for part in parts
        ]
        gradients: dict[str, FloatArray] = {}
        is_finite = bool(np.isfinite(by_state).all())
        for experts in reversed(self._chain.turns(above)):
            number = experts.start
            if self._chain.is_expert(number):
                is_finite &= self._back_through_experts(number, parts)
            else:
                is_finite &= self._back_through_block(number, parts, gradients)
        if not (self._saved and self._saved.most):
            self._kept.forget()
        if not is_finite:
            # A layer that rounds to int8 makes a number of what is none: nobody would see it in the gradient.
            gradients = {name: np.full_like(gradient, np.nan) for name, gradient in gradients.items()}
        return answers, gradients

    def _back_through_block(
        self, number: int, parts: Sequence[Part], gradients: dict[str, FloatArray]
    ) -> bool:
        """The slopes of all parts before a block; whether they are finite.

        Gradients of single rows are added up part by part and row by row. So a sum's bits depend on nothing
        but the rows: shorter ones come first, those of one padded length in the order of the call.
        """
        is_finite = True
        for turn, part in enumerate(parts):
            kept = part.kept.pop()
            given = {name: array.astype(np.float32, copy=False) for name, array in kept.items()}
            part.values |= {**given, "state": given["state"][0]}
            places = self._saved.places(number, turn) if self._saved else {}
            found = self._run(number, BACK_SAVED if places else BACK, part, read(places))
            part.shared.keep(number, found)
            passed = (part.values["state"], found["slope"])
            is_finite &= all(bool(np.isfinite(array).all()) for array in passed)
            self._release(part.values)
            for array in kept.values():
                self._kept.leave(array)
            part.values = {"slope": found["slope"]}
            for ours, its in self._matrices(number):
                of_rows = found[its.gradient]
                total = gradients.setdefault(ours.name, np.zeros(of_rows.shape[1:], np.float32))
                for of_row in of_rows:
                    total += of_row
                self._blocks.release(of_rows)
        return is_finite

    def _back_through_experts(self, number: int, parts: Sequence[Part]) -> bool:
        """The slopes of all parts before the experts of a layer; whether what it read is finite."""
        kept = [part.kept.pop()["state"] for part in parts]
        states = [array[0].astype(np.float32, copy=False) for array in kept]
        slopes = self._experts.back(number, states, [part.values["slope"] for part in parts])
        is_finite = all(bool(np.isfinite(array).all()) for array in (*states, *slopes))
        for part, array, slope in zip(parts, kept, slopes, strict=True):
            self._release(part.values)
            self._kept.leave(array)
            part.values = {"slope": slope}
        return is_finite

    # Through the blocks

    def _below(self, call: _Call, rows: IntArray) -> FloatArray:
        """States [copies, batch, tokens, width] that enter the lowest adapted block, and behind them shared
        values."""
        if self._cache is not None:
            return np.stack([self._cached(call, int(row)) for row in rows.ravel()]).reshape(
                *rows.shape, call.length, -1
            )
        return self._computed(call, rows)

    def _cached(self, call: _Call, row: int) -> FloatArray:
        """The states of a row, kept for its own length: what follows from the row alone."""
        assert self._cache is not None
        alone = call.alone(row)
        states = self._cache.states(
            self._blocks.sha256,
            alone.seen,
            (alone.length, self._blocks.width(self._first) + sum(self._widths)),
            lambda: self._computed(alone, np.zeros((1, 1), np.int64))[0, 0],
        )
        padded = np.zeros((call.length, states.shape[1]), np.float32)
        padded[: alone.length] = states
        return padded

    def _computed(self, call: _Call, rows: IntArray) -> FloatArray:
        parts = self._parts_of_one_copy(call, rows.ravel(), {}, from_tokens=True)
        self._pass(parts, STACK, range(self._first))
        return self._collected(parts, call, self._entering).reshape(*rows.shape, call.length, -1)

    def _parts_of_one_copy(
        self, call: _Call, rows: IntArray, adapter: Arrays, from_tokens: bool = False
    ) -> list[Part]:
        """Rows of one adapter, many in a call: in the place of copies, that get the same adapter."""
        below = None if from_tokens else self._below(call, rows[None])
        return [
            self._part(call, rows[group], below, adapter)
            for group in groups_of_one_adapter(call.lengths[rows], self._bounds)
        ]

    def _part(self, call: _Call, rows: IntArray, below: FloatArray | None, adapter: Arrays) -> Part:
        """Some rows of a call, all of one length; without states from `below` they enter the embedding."""
        length = int(call.lengths[rows.flat[0]])
        shared = SharedValues(self._chain)
        if below is None:
            values: Arrays = {"tokens": call.tokens[rows, :length]}
        else:
            # With one copy for all, every copy's rows are its rows.
            states = below.reshape(-1, *below.shape[2:])
            state, *entering = parted(states[rows % len(states), :length], self._widths)
            values = {"state": state}
            shared.values = dict(zip(self._entering, entering, strict=True))
        given: Arrays = {"ones": np.ones((1, length, 1), np.float32)}
        if self._chain.is_encoder:
            given["padding"] = np.ascontiguousarray(call.padding[rows][..., :length])
        return Part(rows, values, given, shared, adapter)

    def _pass(self, parts: Sequence[Part], role: str, numbers: range, keep: bool = False) -> None:
        for experts in self._chain.turns(numbers):
            number = experts.start
            if self._chain.is_expert(number):
                self._pass_experts(number, parts, keep)
                continue
            for turn, part in enumerate(parts):
                places = self._saved.places(number, turn) if keep and self._saved else {}
                if places:
                    alone = part.of_one_copy({"state": part.values["state"][0]})
                    answer = self._run(number, SAVE, alone, into=written(places))
                    found = {name: array[None] for name, array in answer.items() if name not in places}
                else:
                    found = self._run(number, role, part)
                part.shared.keep(number, found)
                if not keep:
                    part.shared.leave(number, self._blocks.release)
                kept = {"state": part.values["state"]} if keep else {}
                of_pieces = (KEYS, VALUES, *self._chain.carried(number))
                kept |= {name: found.pop(name) for name in of_pieces if name in found}
                if keep:
                    part.kept.append({name: self._kept.keep(array) for name, array in kept.items()})
                self._release(part.values)
                part.values = found

    def _pass_experts(self, number: int, parts: Sequence[Part], keep: bool) -> None:
        """All parts at once, so that an expert is loaded once."""
        names = ("state", "d_state") if "d_state" in parts[0].values else ("state",)
        given = [[part.values[name] for part in parts] for name in names]
        if keep:
            read = self._blocks.routing(number).read
            for part, state in zip(parts, given[0], strict=True):
                part.kept.append({"state": self._kept.keep(state[..., :read])})
        found = self._experts.forward(number, *given)
        for turn, part in enumerate(parts):
            self._release(part.values)
            part.values = dict(zip(names, found[turn :: len(parts)], strict=True))

    def _run(
        self, number: int, role: str, part: Part, more: Arrays | None = None, into: Arrays | None = None
    ) -> Arrays:
        inputs = {**part.values, **part.beside, **part.shared.inputs(number), **(more or {})}
        for ours, its in self._matrices(number):
            for given, asked in ((ours.name, its.name), (ours.u, its.u), (ours.v, its.v)):
                if given in part.adapter:
                    inputs[asked] = part.adapter[given]
            if role != TANGENT:
                copies = len(part.rows) if role == STACK else part.rows.size
                inputs[its.name] = _copies_of(part.adapter[ours.name], copies)
        if self._in_pieces(part):
            in_pieces = {STACK: self._pieces.stack, TANGENT: self._pieces.tangent, BACK: self._pieces.back}
            found = in_pieces[role](number, inputs)
        else:
            for index, table in enumerate(self._chain.blocks[number].tables):
                inputs[f"{TABLE}{index}"] = self._blocks.tables.of(table, part.length)
            found = self._blocks.run(number, role, inputs, into or {})
        if role == STACK and number < self._end:
            for name, array in found.items():
                if name == "state" or name.startswith(GIVEN):
                    found[name] = array.reshape(*part.rows.shape, *array.shape[1:])
        return found

    def _matrices(self, number: int) -> Iterator[tuple[Matrix, Matrix]]:
        """A block's trained matrices, as calls name them and as its programs do."""
        for index, module in enumerate(self._chain.blocks[number].modules):
            adapted = self._chain.modules[module]
            yield from zip(adapted.matrices, adapted.matrices_of(str(index)), strict=True)

    def _release(self, values: Mapping[str, Array]) -> None:
        for array in values.values():
            self._blocks.release(array)

    def _collected(self, parts: Sequence[Part], call: _Call, shared: Sequence[int] = ()) -> FloatArray:
        """The states of all parts by the call's rows, [rows, tokens, width], shared values behind them."""
        width = parts[0].values["state"].shape[-1] + (sum(self._widths) if shared else 0)
        states = np.empty((1 + max(int(part.rows.max()) for part in parts), call.length, width), np.float32)
        for part in parts:
            state = part.values.pop("state")
            states[part.rows, : part.length] = beside(state, [part.shared.values[value] for value in shared])
            # Of rows in pieces; nothing is asked there.
            states[part.rows, part.length :] = 0
            self._blocks.release(state)
        return states

    def _groups(self, call: _Call, rows: IntArray) -> Iterator[tuple[IntArray, int]]:
        """Indices of rows that pass the blocks together, and how many copies of them do."""
        for some in groups(call.lengths[rows], self._bounds):
            yield some, copies_together(int(call.lengths[rows[some[0]]]), self._bounds)

    def _in_pieces(self, part: Part) -> bool:
        return part.length > self._bounds.piece

    def _make_room_to_keep(self, parts: Sequence[Part], blocks: range) -> None:
        numbers = arrays = 0
        turns = [turn.start for turn in self._chain.turns(blocks)]
        for part in parts:
            for block in turns:
                of_rows = [part.rows.size * part.length * self._blocks.width(block)]
                if self._in_pieces(part):
                    of_rows += self._pieces.kept_numbers(block, part.length)
                arrays += len(of_rows)
                numbers += sum(of_rows)
        self._kept.begin(arrays, numbers)

    # From states to answers

    def _answer(self, call: _Call, states: FloatArray) -> Array:
        if self._chain.is_encoder:
            return call.pooled(states, self._chain.pooling)
        return call.asked.told(self._head.read(call.asked, states).logprobs)


class _Call:
    """A call's inputs, all rows as long as the longest; `lengths` i64 [rows] are padded lengths of each."""

    def __init__(self, given: Arrays, contract: Contract, bounds: Bounds) -> None:
        self.given = given
        self._contract = contract
        self._bounds = bounds
        self.lengths: IntArray = np.array([padded_length(count, bounds) for count in self._counts().tolist()])
        self.length = int(self.lengths.max())
        self.tokens: IntArray = self._padded(given["tokens"])
        self.adapter = {name: array for name, array in given.items() if name not in self._of_rows}

    def _counts(self) -> IntArray:
        """Tokens that the outputs of each row depend on, i64 [rows]: none behind the last position that is
        read, nor behind an encoder's mask."""
        if not self._contract.is_encoder:
            return np.asarray(self.given["positions"].max(1) + 1, np.int64)
        mask = self.given["attention_mask"]
        behind = np.where(mask.any(1), mask[:, ::-1].argmax(1), 0)
        return np.asarray(mask.shape[1] - behind, np.int64)

    def _padded(self, array: Array) -> Array:
        """Numbers [rows, tokens] of `length` tokens."""
        kept = array[:, : self.length]
        return np.pad(kept, ((0, 0), (0, self.length - kept.shape[1])))

    def alone(self, row: int) -> _Call:
        """A call of one of its rows, without adapter."""
        given = {name: self.given[name][row : row + 1] for name in self._of_rows}
        return _Call(given, self._contract, self._bounds)

    @property
    def _of_rows(self) -> tuple[str, ...]:
        encoder = self._contract.is_encoder
        return ("tokens", "attention_mask") if encoder else ("tokens", "positions", "targets")

    @property
    def seen(self) -> list[Array]:
        """What the states of its rows follow from."""
        return [self.tokens, *([self.mask] if self._contract.is_encoder else [])]

    @cached_property
    def mask(self) -> FloatArray:
        """1 for a token and 0 for padding, f32 [rows, tokens]."""
        return self._padded(self.given["attention_mask"]).astype(np.float32)

    @cached_property
    def padding(self) -> FloatArray:
        """What an encoder's attention adds, f32 [rows, 1, 1, tokens]."""
        return ((1 - self.mask) * np.float32(MASKED))[:, None, None]

    @property
    def has_equal_copies(self) -> bool:
        """Whether all copies have the same rows, of the same lengths."""
        names = ["tokens", "attention_mask"] if self._contract.is_encoder else ["tokens"]
        each = (self.lengths, *(self.given[name] for name in names))
        arrays = (array.reshape(self._contract.copies, -1) for array in each)
        return all(bool((array == array[:1]).all()) for array in arrays)

    @cached_property
    def asked(self) -> Asked:
        """The positions that a decoder's head is asked at."""
        return Asked(self.given["positions"], self.given["targets"], self.length)

    def pooled(self, states: FloatArray, pooling: str) -> FloatArray:
        """Encoders: one vector for each row, [..., rows, width] of states [..., rows, tokens, width]."""
        if pooling != "mean":
            return np.ascontiguousarray(states[..., 0, :])
        pooled = np.empty((*states.shape[:-2], states.shape[-1]), np.float32)
        for row, length in enumerate(self.lengths):
            mask = self.mask[row, :length, None]
            # Added up token by token: a matrix product may add in another order for another shape.
            pooled[..., row, :] = (mask * states[..., row, :length, :]).sum(-2) / mask.sum()
        return pooled

    def slope_of_pooled(self, slope: FloatArray, pooling: str) -> FloatArray:
        """The states' slope [rows, tokens, width] by that of `pooled`."""
        if pooling != "mean":
            share = np.zeros((len(slope), self.length), np.float32)
            share[:, 0] = 1
        else:
            share = self.mask / self.mask.sum(-1, keepdims=True)
        return share[:, :, None] * slope[:, None, :]


def _copies_of(matrices: FloatArray, copies: int) -> FloatArray:
    """Matrices f32 [copies, rank, width], of as many or of one that stands for all."""
    return np.ascontiguousarray(np.broadcast_to(matrices, (copies, *matrices.shape[1:])))
