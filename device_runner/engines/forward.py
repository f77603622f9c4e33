"""The forward pass of a call's parts through the blocks of a bundle.

What no adapter changes is computed once for all copies. All parts pass a block before the next block is
loaded. A row that is longer than the bundle's chunks is a part of its own, which passes each block in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import numpy as np

from device_runner.engines.activations import ActivationStore, residual_outputs
from device_runner.engines.batch import Arrays, Batch, tokens_of
from device_runner.engines.blocks import Blocks
from device_runner.engines.chunks import Chunks
from device_runner.engines.experts import Experts
from device_runner.engines.planning import copies_together, length_groups, single_adapter_groups, slices
from device_runner.engines.readouts import Readout
from device_runner.engines.shared_values import SharedValues, concatenated, split
from device_runner.engines.trunk_cache import TrunkCache
from prge.engine import Array, Call, Directions, FloatArray, IntArray
from prge.formats.adapter import views
from prge.formats.chain import SHARED_OUT, TABLE
from prge.formats.signatures import BACKWARD, FORWARD, FORWARD_SAVE, JVP, KEYS, VALUES
from prge.model_spec import Matrix

_NOTHING: Mapping[str, Array] = MappingProxyType({})
# f32 [length, width] by the number of each sequence.
Trunk = dict[int, FloatArray]


class Forward:
    """Takes the sequences of a call through the blocks.

    Args:
        blocks: of the bundle.
        call: with its sequences and adapters.
        readout: of the same call.
        cache: keeps the states that enter the lowest adapted block.
    """

    def __init__(self, blocks: Blocks, call: Call, readout: Readout, cache: TrunkCache | None = None) -> None:
        self.blocks = blocks
        self.chain = blocks.chain
        self.call = call
        self.lengths = readout.lengths
        self._readout = readout
        self._cache = cache
        self._adapters = views(self.chain.modules, call.adapters)
        # Shared values that enter the lowest adapted block, and their widths.
        self._entering = self.chain.shared_inputs_from(self.chain.lowest_adapted)
        self._widths = [blocks.shared_width(value) for value in self._entering]

    @cached_property
    def _chunks(self) -> Chunks:
        return Chunks(self.blocks)

    @cached_property
    def _experts(self) -> Experts:
        return Experts(self.blocks)

    # The parts of some sequences, before the lowest adapted block

    def with_copies(self, numbers: IntArray, below: Trunk) -> list[Batch]:
        """Sequences with every copy of the adapter."""
        bounds, copies = self.chain.bounds, len(self.call.adapters)
        if copies == 1:
            grids = single_adapter_groups(numbers, self.lengths, bounds)
            return [self._part(rows, np.zeros(len(rows), np.int64), below) for rows in grids]
        return [
            self._part(np.tile(rows, (mine.stop - mine.start, 1)), np.arange(mine.start, mine.stop), below)
            for rows in length_groups(numbers, self.lengths, bounds)
            for mine in slices(copies, copies_together(int(self.lengths[rows[0]]), bounds))
        ]

    def of_one_copy(self, numbers: IntArray, below: Trunk) -> list[Batch]:
        """Sequences with the only adapter, each part as many rows as a call takes."""
        one = np.zeros(1, np.int64)
        return [
            self._part(rows[None], one, below)
            for rows in length_groups(numbers, self.lengths, self.chain.bounds)
        ]

    def with_directions(self, parts: Sequence[Batch], directions: Directions, mine: slice) -> list[Batch]:
        """The same rows with tangents of 0 along some queries' directions."""
        found = []
        for part in parts:
            state, rows = part.values["hidden_states"][0].copy(), part.rows[0]
            tangents = np.zeros((mine.stop - mine.start, *state.shape), np.float32)
            moved = part.of_one_copy({"hidden_states": state, "tangent_hidden_states": tangents})
            moved.directions = {
                name: np.ascontiguousarray(array[mine][:, rows]) for name, array in directions.items()
            }
            found.append(moved)
        return found

    def _part(self, rows: IntArray, copy: IntArray, below: Trunk) -> Batch:
        states = np.stack([below[number] for number in rows.ravel().tolist()])
        state, *entering = split(states.reshape(*rows.shape, *states.shape[1:]), self._widths)
        shared = SharedValues(self.chain)
        shared.values = dict(zip(self._entering, entering, strict=True))
        return self._new_part(rows, copy, {"hidden_states": state}, shared)

    def _new_part(self, rows: IntArray, copy: IntArray, values: Arrays, shared: SharedValues) -> Batch:
        length = int(self.lengths[rows.flat[0]])
        given = {"ones": np.ones((1, length, 1), np.float32), **self._readout.masks(rows, length)}
        return Batch(rows, copy, values, given, shared)

    # Below the lowest adapted block

    def below(self, numbers: IntArray) -> Trunk:
        """Hidden states that enter the lowest adapted block, and after them shared values."""
        if self._cache is not None:
            return {number: self._cached(number, self._cache) for number in numbers.tolist()}
        return self._computed(numbers)

    def _cached(self, number: int, cache: TrunkCache) -> FloatArray:
        """That of a sequence, kept for its own length: what follows from the sequence alone."""
        sequence, length = self.call.sequences[number], int(self.lengths[number])
        width = self.blocks.width(self.chain.lowest_adapted) + sum(self._widths)
        seen = [np.array(sequence.tokens[:length], np.int64), np.array([length])]
        return cache.states(
            self.blocks.sha256,
            seen,
            (length, width),
            lambda: self._computed(np.array([number]))[number],
        )

    def _computed(self, numbers: IntArray) -> Trunk:
        parts = []
        for rows in single_adapter_groups(numbers, self.lengths, self.chain.bounds):
            tokens = tokens_of(self.call.sequences, rows, int(self.lengths[rows.flat[0]]))
            copy = np.zeros(len(rows), np.int64)
            parts.append(self._new_part(rows, copy, {"tokens": tokens}, SharedValues(self.chain)))
        self.through(parts, FORWARD, range(self.chain.lowest_adapted))
        found: dict[int, FloatArray] = {}
        for part in parts:
            shared = [part.shared.values[value] for value in self._entering]
            states = concatenated(part.values["hidden_states"], shared)
            found |= {int(number): states[place].copy() for place, number in np.ndenumerate(part.rows)}
            self.release(part.values)
        return found

    # Through the blocks

    def through(
        self,
        parts: Sequence[Batch],
        role: str,
        numbers: range,
        store: ActivationStore | None = None,
    ) -> None:
        """Take all parts through some blocks, in place.

        Args:
            parts: before the first of them.
            role: `forward` or `jvp`.
            numbers: of the blocks.
            store: keeps what a backward pass needs, if there is one.
        """
        for experts in self.chain.block_groups(numbers):
            number = experts.start
            if self.chain.is_expert(number):
                self._through_experts(number, parts, store)
                continue
            for index, part in enumerate(parts):
                residuals = store.residuals(number, index) if store else {}
                if residuals:
                    alone = part.of_one_copy({"hidden_states": part.values["hidden_states"][0]})
                    answer = self.run(number, FORWARD_SAVE, alone, into=residual_outputs(residuals))
                    found = {name: array[None] for name, array in answer.items() if name not in residuals}
                else:
                    found = self.run(number, role, part)
                part.shared.take(number, found)
                of_chunks = (KEYS, VALUES, *self.chain.recurrent_states(number))
                needed = {name: found.pop(name) for name in of_chunks if name in found}
                if store is None:
                    part.shared.release_unused(number, self.blocks.release)
                else:
                    store.save(index, {**needed, "hidden_states": part.values["hidden_states"]})
                self.release(part.values)
                part.values = found

    def _through_experts(self, number: int, parts: Sequence[Batch], store: ActivationStore | None) -> None:
        """All parts at once, so that an expert is loaded once."""
        names = (
            ("hidden_states", "tangent_hidden_states")
            if "tangent_hidden_states" in parts[0].values
            else ("hidden_states",)
        )
        given = [[part.values[name] for part in parts] for name in names]
        if store is not None:
            read = self.blocks.routing(number).read_width
            for index, state in enumerate(given[0]):
                store.save(index, {"hidden_states": state[..., :read]})
        found = self._experts.forward(number, *given)
        for turn, part in enumerate(parts):
            self.release(part.values)
            part.values = dict(zip(names, found[turn :: len(parts)], strict=True))

    def run(
        self,
        number: int,
        role: str,
        part: Batch,
        more: Mapping[str, Array] = _NOTHING,
        into: Mapping[str, Array] = _NOTHING,
    ) -> Arrays:
        """What a block answers of a part in a role; see `Blocks.run`."""
        inputs: Arrays = {**part.values, **part.extra_inputs, **part.shared.inputs(number), **more}
        inputs |= self._adapter_inputs(number, role, part)
        if self.in_chunks(part):
            in_chunks = {
                FORWARD: self._chunks.forward,
                JVP: self._chunks.jvp,
                BACKWARD: self._chunks.backward,
            }
            found = in_chunks[role](number, inputs)
        else:
            for index, table in enumerate(self.chain.blocks[number].tables):
                inputs[f"{TABLE}{index}"] = self.blocks.tables.of(table, part.length)
            found = self.blocks.run(number, role, inputs, into)
        if role == FORWARD and number < self.chain.head_start:
            for name, array in found.items():
                if name == "hidden_states" or name.startswith(SHARED_OUT):
                    found[name] = array.reshape(*part.rows.shape, *array.shape[1:])
        return found

    def _adapter_inputs(self, number: int, role: str, part: Batch) -> Arrays:
        """A block's adapter: of each copy, of each row on the way back, or one with directions."""
        inputs: Arrays = {}
        for ours, its in self.matrices(number):
            matrix = self._adapters[ours.name]
            if role == FORWARD:
                inputs[its.name] = np.ascontiguousarray(matrix[part.copy])
            elif role == JVP:
                inputs[its.name] = np.ascontiguousarray(matrix[0])
                inputs |= {its.u: part.directions[ours.u], its.v: part.directions[ours.v]}
            else:
                of_rows = np.broadcast_to(matrix[0], (part.rows.size, *matrix.shape[1:]))
                inputs[its.name] = np.ascontiguousarray(of_rows)
        return inputs

    def matrices(self, number: int) -> Iterator[tuple[Matrix, Matrix]]:
        """A block's trained matrices, as calls name them and as its programs do."""
        for index, module in enumerate(self.chain.blocks[number].modules):
            adapted = self.chain.modules[module]
            yield from zip(adapted.matrices, adapted.matrices_of(str(index)), strict=True)

    def in_chunks(self, part: Batch) -> bool:
        """Whether the rows of a part are longer than a call."""
        return part.length > self.chain.bounds.chunk

    def checkpoint_sizes(self, part: Batch, number: int) -> list[int]:
        """Numbers of each array that a way back needs of a part before a block."""
        of_states = part.rows.size * part.length * self.blocks.width(number)
        return [
            of_states,
            *(self._chunks.checkpoint_sizes(number, part.length) if self.in_chunks(part) else ()),
        ]

    def release(self, values: Mapping[str, Array]) -> None:
        """Let the memory of outputs be used again."""
        for array in values.values():
            self.blocks.release(array)
