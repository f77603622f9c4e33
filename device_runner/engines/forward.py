"""The forward pass of a call through the blocks of a bundle.

Blocks below the adapter are computed once for all copies. All parts of the call pass a block before the next
block is loaded. A row that is longer than the bundle's chunks is a part of its own, which each block computes
in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import numpy as np

from device_runner.engines.activations import ActivationStore, residual_outputs
from device_runner.engines.batch import Arrays, Batch, tokens_of
from device_runner.engines.blocks import Blocks
from device_runner.engines.chunks import Chunks, ComputedPrefix
from device_runner.engines.experts import Experts
from device_runner.engines.planning import (
    copies_together,
    layout_groups,
    micro_batches,
    single_adapter_groups,
    slices,
)
from device_runner.engines.readouts import Readout
from device_runner.engines.shared_values import SharedValues, concatenated, split
from device_runner.engines.trunk_cache import TrunkCache
from prge.engine import Array, Call, Directions, FloatArray, IntArray, common_prefix
from prge.formats.adapter import views
from prge.formats.chain import SHARED_OUT, TABLE
from prge.formats.signatures import BACKWARD, FORWARD, FORWARD_SAVE, JVP, KEYS, VALUES
from prge.model_spec import Matrix

_NOTHING: Mapping[str, Array] = MappingProxyType({})
# f32 [length, width] by the number of each sequence.
Trunk = dict[int, FloatArray]


class Forward:
    """Computes the blocks for the sequences of a call.

    Args:
        blocks: blocks of the bundle.
        call: the call, with its sequences and adapters.
        readout: readout of the same call.
        cache: cache of the hidden states that enter the lowest adapted block.
    """

    def __init__(self, blocks: Blocks, call: Call, readout: Readout, cache: TrunkCache | None = None) -> None:
        self.blocks = blocks
        self.chain = blocks.chain
        self.call = call
        self.lengths, self._layouts = readout.lengths, readout.layouts
        self._readout = readout
        self._cache = cache
        self._adapters = views(self.chain.modules, call.adapters)
        # Numbers of the shared values that enter the lowest adapted block, and their widths.
        self._entering = self.chain.shared_inputs_from(self.chain.lowest_adapted)
        self._widths = [blocks.shared_width(value) for value in self._entering]

    @cached_property
    def _chunks(self) -> Chunks:
        return Chunks(self.blocks)

    @cached_property
    def _experts(self) -> Experts:
        return Experts(self.blocks)

    # Parts of a call before the lowest adapted block

    def micro_batches(self, passes: int, chunk_passes: int | None = None) -> Iterator[IntArray]:
        """Yield the numbers of sequences whose hidden states are held at once; see planning.py."""
        bounds = self.chain.bounds
        return micro_batches(
            self.call.sequences, self.lengths, bounds, passes=passes, chunk_passes=chunk_passes
        )

    def copies_together(self, numbers: IntArray) -> Iterator[slice]:
        """Yield the copies of the adapter whose parts of a micro-batch pass the blocks together."""
        copies, is_in_chunks = len(self.call.adapters), self.lengths[numbers[0]] > self.chain.bounds.chunk
        return slices(copies, 1 if is_in_chunks else copies)

    def with_copies(self, numbers: IntArray, trunk: Trunk, copies: slice) -> list[Batch]:
        """Return batches that compute the given sequences with the given copies of the adapter."""
        limits = self.chain.bounds, self.chain.width
        if len(self.call.adapters) == 1:
            groups = single_adapter_groups(numbers, self._layouts, *limits)
            return [self._part(rows, np.zeros(len(rows), np.int64), trunk) for rows in groups]
        return [
            self._part(
                np.tile(rows, (copy_slice.stop - copy_slice.start, 1)),
                np.arange(copy_slice.start, copy_slice.stop),
                trunk,
            )
            for rows in layout_groups(numbers, self._layouts, *limits)
            for copy_slice in slices(
                copies.stop, copies_together(len(rows), int(self.lengths[rows[0]]), *limits), copies.start
            )
        ]

    def of_one_copy(self, numbers: IntArray, trunk: Trunk, queries: int = 0) -> list[Batch]:
        """Return parts of some sequences with the only adapter, each with as many rows as a call takes."""
        one, bounds = np.zeros(1, np.int64), self.chain.bounds
        values = 1 + min(queries, bounds.queries)
        return [
            self._part(rows[None], one, trunk)
            for rows in layout_groups(numbers, self._layouts, bounds, self.chain.width, values)
        ]

    def with_directions(self, parts: Sequence[Batch], directions: Directions, queries: slice) -> list[Batch]:
        """Return a batch of the same rows with zero tangents and the directions of some queries."""
        directed_parts = []
        for part in parts:
            states, rows = part.values["hidden_states"][0].copy(), part.rows[0]
            tangents = np.zeros((queries.stop - queries.start, *states.shape), np.float32)
            directed = part.of_one_copy({"hidden_states": states, "tangent_hidden_states": tangents})
            directed.directions = {
                name: np.ascontiguousarray(array[queries][:, rows]) for name, array in directions.items()
            }
            directed_parts.append(directed)
        return directed_parts

    def _part(self, rows: IntArray, copy: IntArray, trunk: Trunk) -> Batch:
        states = np.stack([trunk[number] for number in rows.ravel().tolist()])
        hidden_states, *shared_values = split(states.reshape(*rows.shape, *states.shape[1:]), self._widths)
        shared = SharedValues(self.chain)
        shared.values = dict(zip(self._entering, shared_values, strict=True))
        return self._new_part(rows, copy, {"hidden_states": hidden_states}, shared)

    def _new_part(self, rows: IntArray, copy: IntArray, values: Arrays, shared: SharedValues) -> Batch:
        layout = self._layouts[rows.flat[0]]
        extra_inputs = {"ones": np.ones((1, layout.length, 1), np.float32)}
        extra_inputs |= self._readout.masks(rows, layout.length)
        return Batch(rows, copy, layout, values, extra_inputs, shared)

    # Below the lowest adapted block

    def trunk(self, numbers: IntArray) -> Trunk:
        """Return the hidden states that enter the lowest adapted block, concatenated with shared values."""
        if self._cache is not None:
            return {number: self._cached(number, self._cache) for number in numbers.tolist()}
        return self._computed(numbers)

    def _cached(self, number: int, cache: TrunkCache) -> FloatArray:
        """Return the hidden states of one sequence, which don't depend on other sequences."""
        sequence, layout = self.call.sequences[number], self._layouts[number]
        width = self.blocks.width(self.chain.lowest_adapted) + sum(self._widths)
        tokens = np.array(sequence.tokens[: layout.length], np.int64)
        return cache.states(
            self.blocks.sha256,
            [tokens, np.array([layout.length, *layout.branches])],
            (layout.length, width),
            lambda: self._computed(np.array([number]))[number],
        )

    def _computed(self, numbers: IntArray) -> Trunk:
        parts = []
        for rows in single_adapter_groups(numbers, self._layouts, self.chain.bounds, self.chain.width):
            tokens = tokens_of(self.call.sequences, rows, int(self.lengths[rows.flat[0]]))
            copy = np.zeros(len(rows), np.int64)
            parts.append(self._new_part(rows, copy, {"tokens": tokens}, SharedValues(self.chain)))
        self.run_blocks(parts, FORWARD, range(self.chain.lowest_adapted))
        trunk: dict[int, FloatArray] = {}
        for part in parts:
            shared = [part.shared.values[value] for value in self._entering]
            states = concatenated(part.values["hidden_states"], shared)
            trunk |= {int(number): states[index].copy() for index, number in np.ndenumerate(part.rows)}
            self.release(part.values)
        return trunk

    # From block to block

    def run_blocks(
        self,
        parts: Sequence[Batch],
        role: str,
        numbers: range,
        store: ActivationStore | None = None,
    ) -> None:
        """Compute some blocks for all parts, in place.

        Args:
            parts: parts of the call with the inputs of the first of the blocks.
            role: `forward` or `jvp`.
            numbers: numbers of the blocks.
            store: saves what the backward pass needs, if there is one.
        """
        prefixes = self._common_prefixes(parts) if role == FORWARD else {}
        needed = {earlier for earlier, _ in prefixes.values()}
        for group in self.chain.block_groups(numbers):
            number = group.start
            if self.chain.is_expert(number):
                self._run_experts(number, parts, store)
                continue
            computed: dict[int, Arrays] = {}
            for index, part in enumerate(parts):
                residuals = store.residuals(number, index) if store else {}
                if residuals:
                    single = part.of_one_copy({"hidden_states": part.values["hidden_states"][0]})
                    single_outputs = self.run(number, FORWARD_SAVE, single, into=residual_outputs(residuals))
                    outputs = {
                        name: array[None] for name, array in single_outputs.items() if name not in residuals
                    }
                else:
                    prefix = None
                    if index in prefixes:
                        earlier, tokens = prefixes[index]
                        prefix = ComputedPrefix(computed[earlier], parts[earlier].length, tokens)
                    outputs = self.run(number, role, part, computed=prefix)
                if index in needed:
                    computed[index] = {**outputs}
                part.shared.take(number, outputs)
                saved_names = (KEYS, VALUES, *self.chain.recurrent_states(number))
                saved = {name: outputs.pop(name) for name in saved_names if name in outputs}
                if store is None:
                    part.shared.release_unused(number, self.blocks.release)
                else:
                    store.save(index, {**saved, "hidden_states": part.values["hidden_states"]})
                self.release(part.values)
                part.values = outputs

    def _common_prefixes(self, parts: Sequence[Batch]) -> dict[int, tuple[int, int]]:
        """Return an earlier part with the same adapter and the longest common prefix, and its tokens.

        Only parts that are computed in chunks have one, by their numbers.
        """
        rows_before: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        prefixes: dict[int, tuple[int, int]] = {}
        for index, part in enumerate(parts):
            if self.in_chunks(part):
                tokens = self.call.sequences[part.rows.item()].tokens
                before = rows_before.setdefault(part.copy.item(), [])
                common = [(common_prefix(tokens, others), earlier) for earlier, others in before]
                longest, earlier = max(common, default=(0, 0))
                if longest:
                    prefixes[index] = earlier, longest
                before.append((index, tokens))
        return prefixes

    def _run_experts(self, number: int, parts: Sequence[Batch], store: ActivationStore | None) -> None:
        """Compute the experts of a layer for all parts at once, so that each expert is loaded once."""
        names = (
            ("hidden_states", "tangent_hidden_states")
            if "tangent_hidden_states" in parts[0].values
            else ("hidden_states",)
        )
        inputs = [[part.values[name] for part in parts] for name in names]
        if store is not None:
            read = self.blocks.routing(number).read_width
            for index, state in enumerate(inputs[0]):
                store.save(index, {"hidden_states": state[..., :read]})
        outputs = self._experts.forward(number, *inputs)
        for index, part in enumerate(parts):
            self.release(part.values)
            part.values = dict(zip(names, outputs[index :: len(parts)], strict=True))

    def run(
        self,
        number: int,
        role: str,
        part: Batch,
        extra: Mapping[str, Array] = _NOTHING,
        into: Mapping[str, Array] = _NOTHING,
        computed: ComputedPrefix | None = None,
    ) -> Arrays:
        """Run a block on a part in a role; see `Blocks.run` and `Chunks.forward`."""
        inputs: Arrays = {**part.values, **part.extra_inputs, **part.shared.inputs(number), **extra}
        inputs |= self._adapter_inputs(number, role, part)
        if self.in_chunks(part):
            if role == FORWARD:
                outputs = self._chunks.forward(number, inputs, computed)
            else:
                run_chunks = {JVP: self._chunks.jvp, BACKWARD: self._chunks.backward}
                outputs = run_chunks[role](number, inputs)
        else:
            for index, table in enumerate(self.chain.blocks[number].tables):
                inputs[f"{TABLE}{index}"] = self.blocks.tables.of(
                    table, part.length, branches=part.layout.branches
                )
            outputs = self.blocks.run(number, role, inputs, into)
        if role == FORWARD and number < self.chain.head_start:
            for name, array in outputs.items():
                if name == "hidden_states" or name.startswith(SHARED_OUT):
                    outputs[name] = array.reshape(*part.rows.shape, *array.shape[1:])
        return outputs

    def _adapter_inputs(self, number: int, role: str, part: Batch) -> Arrays:
        """Return a block's adapter: per copy in `forward`, per row in backward, with directions in `jvp`."""
        inputs: Arrays = {}
        for matrix_spec, block_matrix in self.matrices(number):
            matrix = self._adapters[matrix_spec.name]
            if role == FORWARD:
                inputs[block_matrix.name] = np.ascontiguousarray(matrix[part.copy])
            elif role == JVP:
                inputs[block_matrix.name] = np.ascontiguousarray(matrix[0])
                inputs |= {
                    block_matrix.u: part.directions[matrix_spec.u],
                    block_matrix.v: part.directions[matrix_spec.v],
                }
            else:
                row_matrices = np.broadcast_to(matrix[0], (part.rows.size, *matrix.shape[1:]))
                inputs[block_matrix.name] = np.ascontiguousarray(row_matrices)
        return inputs

    def matrices(self, number: int) -> Iterator[tuple[Matrix, Matrix]]:
        """Yield a block's trained matrices, each with its names in calls and in the block's programs."""
        for index, module in enumerate(self.chain.blocks[number].modules):
            adapted = self.chain.modules[module]
            yield from zip(adapted.matrices, adapted.matrices_of(str(index)), strict=True)

    def in_chunks(self, part: Batch) -> bool:
        """Return whether the rows of a part are longer than a call."""
        return part.length > self.chain.bounds.chunk

    def checkpoint_sizes(self, part: Batch, number: int) -> list[int]:
        """Return the number of elements of each array that the backward pass of a block needs for a part."""
        of_states = part.rows.size * part.length * self.blocks.width(number)
        return [
            of_states,
            *(self._chunks.checkpoint_sizes(number, part.length) if self.in_chunks(part) else ()),
        ]

    def release(self, values: Mapping[str, Array]) -> None:
        """Make the memory of outputs available again."""
        for array in values.values():
            self.blocks.release(array)
