"""The methods of a chain's blocks: loaded on first use, with one arena, and kept while memory allows.

blocks.run(3, "forward", {"hidden_states": ..., "lora_b.0": ...}) -> {"hidden_states": ...}
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from device_runner.engines.backend import Backend
from device_runner.engines.base import BoundCall
from device_runner.engines.child_check import check_in_child
from device_runner.engines.errors import EngineRefusalError, captured_stderr, load_error, program_mismatch
from device_runner.engines.packed_files import HashedFile, PackedFiles
from device_runner.engines.shapes import (
    PROBE_SIZES,
    AttentionHeads,
    MethodShapes,
    block_problems,
    program_problems,
    with_specs,
)
from device_runner.engines.tables import Tables
from prge.engine import Array, FloatArray
from prge.errors import EngineError
from prge.formats.bundle import Bundle, check_content
from prge.formats.chain import TABLE, BlockProgram, Interface, TensorSpec
from prge.formats.peft import scaled_lora_a
from prge.formats.signatures import BACKWARD, DECODE, FORWARD, PREFILL, RESIDUAL_ROLES
from prge.numerics.expert_routing import Routing
from prge.system.memory import available_memory

# Residuals may take 1 / _SHARE of the available memory.
_SHARE = 4


class Blocks:
    """The blocks of an opened bundle on one engine.

    Args:
        bundle: an opened bundle.
        backend: the engine.
        roles: roles that will be run.
        loaded: bytes of weights that may stay loaded; by default all. See `spare_bytes`.
        log: called with messages for the user.

    Raises:
        BundleError: the engine refuses a file or aborts on it, or a file isn't the one in the manifest.
        EngineError: the runtime is missing or lacks memory, or `loaded` is less than the largest block.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        roles: Iterable[str],
        loaded: int | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._bundle = bundle
        self._runtime = backend.runtime
        self._programs = [self._open_program(program) for program in bundle.chain.programs]
        self.chain = with_specs(bundle.chain, self._programs)
        self.tables = Tables(bundle, self.chain)
        self._roles = {FORWARD, *roles}
        if BACKWARD in self._roles and backend.name == "native":
            self._roles |= {*RESIDUAL_ROLES}
        # Blocks with the same weights share the methods of the first such block.
        self._first = self.chain.first_with_weights
        # Methods by block and role; the block that was used last comes last.
        self._loaded: dict[int, dict[str, Any]] = {}
        # Methods of blocks whose weights are released: loading a method takes longer than reading its
        # weights.
        self._idle: dict[int, dict[str, Any]] = {}
        self._spare: dict[int, list[Array]] = {}
        self._max_loaded = loaded
        self._previous = 0
        self._bytes = self.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size)
        if loaded is not None and loaded < max(self._bytes):
            raise EngineError(
                f"Cannot load the largest block: {loaded} bytes of weights may be loaded, the block has "
                f"{max(self._bytes)}.",
                remedy=f"Allow at least {max(self._bytes)} bytes, or set no limit.",
                code="memory-too-little",
            )
        self._shapes = MethodShapes(self.chain, self.tables)
        for number, block in enumerate(self.chain.blocks):
            if problems := [*block_problems(self.chain, self._shapes, number)]:
                raise program_mismatch(bundle.file(self.chain.programs[block.program].file), problems)
        is_native = backend.name == "native"
        self._packed = PackedFiles(log) if is_native else None
        self.files = {number: self._open_weights(number) for number in dict.fromkeys(self._first)}
        """Weights files by the first block that uses each."""
        for number, file in self.files.items():
            if file.packed is None:
                self._try_in_child(number)
        self._arena = self._new_arena() if is_native else None

    def heads(self, number: int) -> AttentionHeads:
        """Return the number and widths of the heads of a block's attention."""
        return self._shapes.heads[number]

    def recurrent_states(self, number: int) -> Mapping[str, tuple[int, int]]:
        """Return height and width of a block's recurrent states, by name."""
        return self._shapes.recurrent_states[number]

    @cached_property
    def lora_a(self) -> dict[str, FloatArray]:
        """The bundle's frozen lora_A matrices by module, which generation passes as inputs."""
        return scaled_lora_a(self._bundle.adapter)

    def interface(self, number: int, role: str) -> Interface:
        """Return names and specs of the inputs and outputs of a block's method."""
        return self.chain.programs[self.chain.blocks[number].program].methods[role]

    @property
    def sha256(self) -> str:
        """Hash of the bundle."""
        return self._bundle.sha256

    def width(self, number: int) -> int:
        """Return the width of hidden states that enter a block, or a layer's experts (by the first one)."""
        routing = self._shapes.routings.get(number)
        return routing.entering if routing else self._shapes.widths[number][0]

    def routing(self, number: int) -> Routing:
        """Return the layout of hidden states around a layer's experts, by the first expert's number."""
        return self._shapes.routings[number]

    def shared_width(self, value: int) -> int:
        """Return the width of a shared value."""
        return self._shapes.shared[value]

    def residual_widths(self, number: int) -> Mapping[str, int]:
        """Return the widths of the residuals that a block saves for its backward pass, by name."""
        return self._shapes.residuals[number]

    @property
    def spare_bytes(self) -> int:
        """Bytes that `loaded`, or a share of the available memory, leaves for residuals next to all weights.

        Weights that aren't mapped from a packed file are in memory once for each method. The result is 0 for
        the torch engine, which holds memory for the largest outputs of each method.
        """
        if self._packed is None:
            return 0
        weights = sum(
            self._bytes[number] * (1 if file.packed else len(self._roles))
            for number, file in self.files.items()
        )
        if self._max_loaded is not None:
            return max(0, self._max_loaded - weights)
        return max(0, available_memory() - weights) // _SHARE

    def run(
        self,
        number: int,
        role: str,
        inputs: Mapping[str, Array],
        into: Mapping[str, Array] = MappingProxyType({}),
    ) -> dict[str, Array]:
        """Run one method of a block.

        Args:
            number: number of the block.
            role: one of the roles of its program.
            inputs: contiguous arrays by name, with all inputs of the method; others are ignored.
            into: memory f32 [elements] by output name; such an output is written to the beginning of its
                memory.

        Returns:
            Outputs by name; those that aren't in `into` are in memory that `release` takes back.

        Raises:
            EngineRefusalError: the engine failed.
        """
        interface = self.interface(number, role)
        outputs = [
            into[name] if name in into else self._output_memory(spec)
            for name, spec in zip(interface.outputs, interface.output_specs, strict=True)
        ]
        method = self.method(number, role)
        shapes = method.run([inputs[name] for name in interface.inputs], outputs)
        return {
            name: output[: math.prod(shape)].reshape(shape)
            for name, output, shape in zip(interface.outputs, outputs, shapes, strict=True)
        }

    def bind_calls(
        self,
        role: str,
        calls: Mapping[int, BoundCall | Callable[[], None]],
        before: Callable[[int], None] | None = None,
    ) -> Callable[[], None]:
        """Return a function that runs a role of several blocks on the current contents of fixed arrays.

        Args:
            calls: for each block number, in order, the arrays of its call in the order of the method, or a
                function to call instead.
            before: called with each block's number before the block runs; may fill its inputs. Without it,
                the caches of `stores` must be float32.

        Raises:
            EngineRefusalError: an array doesn't fit the method. The function raises it if the engine fails.
        """
        bound = [(number, each) for number, each in calls.items() if isinstance(each, BoundCall)]
        if self._max_loaded is None and before is None and len(bound) == len(calls):
            return self._runtime.bind_calls([(self.method(number, role), each) for number, each in bound])

        def compute() -> None:
            for number, each in calls.items():
                if before is not None:
                    before(number)
                if isinstance(each, BoundCall):
                    each.run(self.method(number, role))
                else:
                    each()

        return compute

    def _read_ahead(self, number: int) -> None:
        """Ask the system to read the next block's packed file while this block computes.

        A call visits the blocks upwards, and a backward pass downwards: the next block follows from the last
        two.
        """
        previous, self._previous = self._previous, number
        if self._max_loaded is None or number == previous:
            return
        next_block = number + 1 if number > previous else number - 1
        if not 0 <= next_block < len(self._first) or self._loaded.get(self._first[next_block]):
            return
        if self.chain.is_expert(next_block):
            # Possibly no token is routed to this expert.
            return
        path = self.files[self._first[next_block]].packed
        if path is not None and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError), path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def release(self, array: Array) -> None:
        """Make the memory of an output available again."""
        base = array.base
        if base is not None and base.ndim == 1 and base.size in self._spare:
            self._spare[base.size].append(base)

    def _output_memory(self, spec: TensorSpec) -> Array:
        """Return memory for the largest size of an output; pages take no memory until they are written."""
        size = math.prod(spec.sizes)
        spare = self._spare.setdefault(size, [])
        return spare.pop() if spare else _untouched(size)

    def method(self, number: int, role: str) -> Any:
        """Return a block's method; its weights stay in memory until another method is requested."""
        first = self._first[number]
        held = self._loaded.pop(first, None)
        methods = self._loaded[first] = held or self._idle.pop(first, {})
        if held is None or role not in methods:
            self._make_room(first, role)
            methods = self._loaded.setdefault(first, methods)
        if role not in methods:
            methods[role] = self._load(first, role, self._arena)
        self._read_ahead(number)
        return methods[role]

    def _make_room(self, number: int, role: str) -> None:
        """Release weights of other blocks until those of this block fit.

        The most recently used blocks are released first: a call visits the blocks in order, so they are
        needed last. Methods are kept without their weights, except for experts, which are many.
        """
        others = [other for other in reversed(self._loaded) if other != number]
        for other in (*others, number):
            if self._max_loaded is None or self._loaded_bytes(number, role) <= self._max_loaded:
                return
            methods = self._loaded.pop(other)
            if self.chain.is_expert(other) or not self.files[other].release_pages():
                methods.clear()
            else:
                self._idle[other] = methods

    def _loaded_bytes(self, number: int, role: str) -> int:
        """Return the bytes of loaded weights including a block's method; methods share a packed file."""
        counts = {other: len(methods) for other, methods in self._loaded.items()}
        counts[number] = len({role, *self._loaded.get(number, ())})
        return sum(
            self._bytes[other] * (count if self.files[other].packed is None else 1)
            for other, count in counts.items()
            if count
        )

    def _load(self, number: int, role: str, arena: Any) -> Any:
        program_number = self.chain.blocks[number].program
        program, name = self._programs[program_number], self.chain.programs[program_number].method_name(role)
        with captured_stderr() as log:
            try:
                return program.load(name, weights=self.files[number], arena=arena)
            except RuntimeError as error:
                refusal = (
                    error if isinstance(error, EngineRefusalError) else EngineRefusalError(str(error), log())
                )
                raise load_error(self._bundle.file(self.chain.blocks[number].weights), refusal) from None

    def _open_program(self, described: BlockProgram) -> Any:
        """Open a program of the bundle and compare its specs with the manifest."""
        path = self._bundle.file(described.file)
        with captured_stderr() as log:
            try:
                program = self._runtime.Program(path)
                problems = [*program_problems(described, program)]
            except RuntimeError as error:
                refused = (
                    error if isinstance(error, EngineRefusalError) else EngineRefusalError(str(error), log())
                )
                raise load_error(path, refused) from None
        if problems:
            raise program_mismatch(path, problems)
        return program

    def _new_arena(self) -> Any:
        size = max(
            program.arena_bytes(described.method_name(role))
            for program, described in zip(self._programs, self.chain.programs, strict=True)
            for role in described.methods
        )
        try:
            return self._runtime.Arena(size)
        except EngineRefusalError as error:
            raise load_error(self._bundle.folder, error) from None

    def _open_weights(self, number: int) -> Any:
        """Open a block's weights file and check that the engine can run its program with it."""
        block = self.chain.blocks[number]
        described = self.chain.programs[block.program]
        weights, program = self._bundle.file(block.weights), self._bundle.file(described.file)
        if self._packed is not None:
            probes = {
                described.method_name(role): self._probe_inputs(number, role) for role in described.methods
            }
            try:
                return self._packed.open(
                    HashedFile(program, self._bundle.hash_of(described.file)),
                    HashedFile(weights, self._bundle.hash_of(block.weights)),
                    probes,
                )
            except EngineRefusalError as error:
                raise load_error(weights, error) from None
        check_content(self._bundle.folder, self._bundle.manifest, block.weights)
        return self._runtime.WeightsFile(weights)

    def _try_in_child(self, number: int) -> None:
        """Load and run a block's methods in a child process."""
        block = self.chain.blocks[number]
        program = self._programs[block.program]

        def attempt() -> None:
            if self._packed is not None:
                self._runtime.without_threads()
            described = self.chain.programs[block.program]
            for role in self._roles & set(described.methods):
                outputs = [self._output_memory(spec) for spec in self.interface(number, role).output_specs]
                method = program.load(described.method_name(role), weights=self.files[number])
                method.run(self._probe_inputs(number, role), outputs)

        check_in_child(self._bundle.file(block.weights), attempt)

    def _probe_inputs(self, number: int, role: str) -> list[Array]:
        """Return reproducible inputs of a method that reach every weight and the last rows of tables."""
        chain, block, random = self.chain, self.chain.blocks[number], np.random.default_rng(0)
        bounds = chain.bounds.per_call
        # Positions are indices: the first block's program may have fewer positions than the manifest says.
        tokens = bounds.tokens if number == 0 else min(PROBE_SIZES.tokens, bounds.tokens)
        sizes = replace(PROBE_SIZES, tokens=tokens, states=min(PROBE_SIZES.states, bounds.states))

        def one(name: str) -> Array:
            spec = self._shapes.of(number, role, name, sizes)
            dtype, shape = spec.dtype, spec.sizes
            if name.startswith(TABLE):
                # Generation uses the last positions of the context, other roles those of a row.
                start = bounds.context - shape[1] if role in (PREFILL, DECODE) and number == 0 else 0
                return self.tables.of(block.tables[int(name.removeprefix(TABLE))], shape[1], start)
            if dtype == "int64":
                most = chain.shard_size if name == "targets" else chain.vocabulary_size
                indices = random.integers(0, most, shape)
                indices[..., -1] = most - 1
                return indices
            return 0.1 * random.standard_normal(shape, np.float32)

        return [one(name) for name in chain.programs[block.program].methods[role].inputs]


def _untouched(size: int) -> Array:
    """Allocate float32 elements; only pages that are written take memory."""
    memory = mmap.mmap(-1, max(4 * size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32, size)
