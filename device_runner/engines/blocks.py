"""The methods of a chain's blocks: loaded when their turn comes, with one arena, kept while memory allows.

    blocks.run(3, "stack", {"state": state, "lora_b.0": matrix, ...}) -> {"state": next_state}

A block's weights are mapped from its packed file where the engine can have one, else they are in memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from device_runner.engines.child_check import check_in_child
from device_runner.engines.choice import Backend
from device_runner.engines.interfaces import (
    TRIED,
    AttentionHeads,
    Shapes,
    block_problems,
    program_problems,
    with_specs,
)
from device_runner.engines.packed_files import HashedFile, PackedFiles
from device_runner.engines.refusals import RefusedError, captured_stderr, foreign_program, load_error
from device_runner.engines.tables import Tables
from prge.engine import Array, FloatArray
from prge.errors import EngineError
from prge.files.bundle import Bundle, check_content
from prge.files.chain import TABLE, Interface, Kind, TensorSpec
from prge.files.peft import scaled_lora_a
from prge.files.signatures import BACK, DECODE, OF_BACK, PREFILL, STACK
from prge.host.memory import available_memory
from prge.learning.experts import Routing

# Of the memory that is available, one part in so many may hold what forward passes save.
_SHARE = 4


class Blocks:
    """The blocks of an opened bundle on one of the engines.

    Args:
        bundle: an opened bundle.
        backend: the engine.
        roles: those that are going to be run.
        loaded: bytes of weights that may stay loaded; by default all may. See `beside_weights`.
        tell: called with what a user should know.

    Raises:
        BundleError: the engine refuses a file or aborts on it, or a file isn't the manifest's.
        EngineError: the runtime can't be had, or lacks memory; or no block may stay loaded.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        roles: Iterable[str],
        loaded: int | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._bundle = bundle
        self._runtime = backend.runtime
        self._programs = [self._opened(kind) for kind in bundle.chain.kinds]
        self.chain = with_specs(bundle.chain, self._programs)
        self.tables = Tables(bundle, self.chain)
        self._roles = {STACK, *roles}
        if BACK in self._roles and backend.name == "native":
            self._roles |= {*OF_BACK}
        # A layer that is used again is loaded once, as the first block with its weights.
        self._first = self.chain.first_of_weights
        # Methods by block and role, those of the block that was used last at the end.
        self._loaded: dict[int, dict[str, Any]] = {}
        # Of blocks whose weights aren't in memory: to load a method takes longer than to read its weights.
        self._idle: dict[int, dict[str, Any]] = {}
        self._spare: dict[int, list[Array]] = {}
        self._most = loaded
        self._before = 0
        self._bytes = self.chain.loaded_bytes(lambda name: bundle.file(name).stat().st_size)
        if loaded is not None and loaded < max(self._bytes):
            raise EngineError(
                f"no block may stay loaded: {loaded} bytes of weights may, the largest block has "
                f"{max(self._bytes)}",
                remedy=f"allow at least {max(self._bytes)}, or all",
                code="memory-too-little",
            )
        self._shapes = Shapes(self.chain, self.tables)
        for number, block in enumerate(self.chain.blocks):
            if problems := [*block_problems(self.chain, self._shapes, number)]:
                raise foreign_program(bundle.file(self.chain.kinds[block.kind].program), problems)
        is_native = backend.name == "native"
        self._packed = PackedFiles(tell) if is_native else None
        self.files = {number: self._weights(number) for number in dict.fromkeys(self._first)}
        """Weights files by the first block that has each."""
        for number, file in self.files.items():
            if file.packed is None:
                self._try(number)
        self._arena = self._new_arena() if is_native else None

    def heads(self, number: int) -> AttentionHeads:
        """The heads of a block's attention."""
        return self._shapes.heads[number]

    def carried(self, number: int) -> Mapping[str, tuple[int, int]]:
        """Height and width of what a block carries from call to call, by name."""
        return self._shapes.carried[number]

    @cached_property
    def lora_a(self) -> dict[str, FloatArray]:
        """The bundle's own, by module; what writes text takes it as an input."""
        return scaled_lora_a(self._bundle.adapter)

    def interface(self, number: int, role: str) -> Interface:
        """Names of what a block's method takes and answers."""
        return self.chain.kinds[self.chain.blocks[number].kind].methods[role]

    @property
    def sha256(self) -> str:
        """Hash of the bundle."""
        return self._bundle.sha256

    def width(self, number: int) -> int:
        """Width of the states that enter a block, or the experts of a layer by the first one's number."""
        routing = self._shapes.routings.get(number)
        return routing.entering if routing else self._shapes.widths[number][0]

    def routing(self, number: int) -> Routing:
        """How states lie around the experts of a layer, by the first one's number."""
        return self._shapes.routings[number]

    def shared_width(self, value: int) -> int:
        """Width of a shared value."""
        return self._shapes.shared[value]

    def saved_widths(self, number: int) -> Mapping[str, int]:
        """Widths by name of the values that a block saves for the way back."""
        return self._shapes.saved[number]

    @property
    def beside_weights(self) -> int:
        """Bytes that are left where all weights stay loaded: of those that may, or a share of what the system
        has.

        What isn't mapped from a packed file lies in memory once for each method. The torch engine has 0: it
        holds room for the largest answers of each method.
        """
        if self._packed is None:
            return 0
        weights = sum(
            self._bytes[number] * (1 if file.packed else len(self._roles))
            for number, file in self.files.items()
        )
        if self._most is not None:
            return max(0, self._most - weights)
        return max(0, available_memory() - weights) // _SHARE

    def run(
        self,
        number: int,
        role: str,
        inputs: Mapping[str, Array],
        into: Mapping[str, Array] = MappingProxyType({}),
    ) -> dict[str, Array]:
        """Compute a block.

        Args:
            number: of the block.
            role: of its kind's.
            inputs: contiguous arrays, all that the method asks for; more are left out.
            into: memory f32 [numbers] of some outputs, which are written to its beginning.

        Returns:
            Outputs by name, the others in memory that `release` takes back.

        Raises:
            RefusedError: the engine failed.
        """
        interface = self.interface(number, role)
        outputs = [
            into[name] if name in into else self._room(spec)
            for name, spec in zip(interface.outputs, interface.output_specs, strict=True)
        ]
        method = self.method(number, role)
        shapes = method.run([inputs[name] for name in interface.inputs], outputs)
        return {
            name: output[: math.prod(shape)].reshape(shape)
            for name, output, shape in zip(interface.outputs, outputs, shapes, strict=True)
        }

    def in_a_row(
        self,
        role: str,
        calls: Mapping[int, tuple[Sequence[Array], Sequence[Array]] | Callable[[], None]],
        before: Callable[[int], None] | None = None,
    ) -> Callable[[], None]:
        """A function that runs a role of blocks, of what the arrays hold when it is called.

        Args:
            calls: by each block's number, in order: inputs and outputs, contiguous and in its method's order;
                or what is called in its place.
            before: is called with each block's number before it runs, and may fill its inputs.

        Raises:
            RefusedError: an array isn't what the method takes. So does the function if the engine fails.
        """
        if self._most is None and before is None and not any(map(callable, calls.values())):
            bound: Any = calls
            return self._runtime.in_a_row([(self.method(n, role), *each) for n, each in bound.items()])

        def compute() -> None:
            for number, each in calls.items():
                if before is not None:
                    before(number)
                if callable(each):
                    each()
                else:
                    self.method(number, role).run(*each)

        return compute

    def _read_ahead(self, number: int) -> None:
        """Have the system read the next block's packed file while this one computes, unless it is loaded.

        A call goes up through the blocks, and an exact one down again: the next block is the one beyond this
        one, seen from the one before.
        """
        before, self._before = self._before, number
        if self._most is None or number == before:
            return
        following = number + 1 if number > before else number - 1
        if not 0 <= following < len(self._first) or self._loaded.get(self._first[following]):
            return
        if self.chain.is_expert(following):
            # It may be that no token asks for it.
            return
        path = self.files[self._first[following]].packed
        if path is not None and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError), path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def release(self, array: Array) -> None:
        """Let the memory of an output be used again."""
        base = array.base
        if base is not None and base.ndim == 1 and base.size in self._spare:
            self._spare[base.size].append(base)

    def _room(self, spec: TensorSpec) -> Array:
        """Memory of an output of any size: pages that nothing was written to take none."""
        size = math.prod(spec.sizes)
        spare = self._spare.setdefault(size, [])
        return spare.pop() if spare else _untouched(size)

    def method(self, number: int, role: str) -> Any:
        """A block's method, with its weights in memory; they stay so until the next one is asked for."""
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
        """Give weights of blocks back until those of this one fit beside the rest.

        Those that were used last go first: a call takes all blocks in their order, so they are needed last.
        Methods stay without their weights, but for those of experts, which are many.
        """
        others = [other for other in reversed(self._loaded) if other != number]
        for other in (*others, number):
            if self._most is None or self._held(number, role) <= self._most:
                return
            methods = self._loaded.pop(other)
            if self.chain.is_expert(other) or not self.files[other].give_back():
                methods.clear()
            else:
                self._idle[other] = methods

    def _held(self, number: int, role: str) -> int:
        """Bytes of the loaded weights with a method of a block; methods share a packed file's."""
        counts = {other: len(methods) for other, methods in self._loaded.items()}
        counts[number] = len({role, *self._loaded.get(number, ())})
        return sum(
            self._bytes[other] * (count if self.files[other].packed is None else 1)
            for other, count in counts.items()
            if count
        )

    def _load(self, number: int, role: str, arena: Any) -> Any:
        program = self._programs[self.chain.blocks[number].kind]
        with captured_stderr() as log:
            try:
                return program.load(role, weights=self.files[number], arena=arena)
            except RuntimeError as error:
                refused = error if isinstance(error, RefusedError) else RefusedError(str(error), log())
                raise load_error(self._bundle.file(self.chain.blocks[number].weights), refused) from None

    def _opened(self, kind: Kind) -> Any:
        """The program of a kind, which has the specs that the manifest says."""
        path = self._bundle.file(kind.program)
        with captured_stderr() as log:
            try:
                program = self._runtime.Program(path)
                problems = [*program_problems(kind, program)]
            except RuntimeError as error:
                refused = error if isinstance(error, RefusedError) else RefusedError(str(error), log())
                raise load_error(path, refused) from None
        if problems:
            raise foreign_program(path, problems)
        return program

    def _new_arena(self) -> Any:
        size = max(
            program.arena_bytes(role)
            for program, kind in zip(self._programs, self.chain.kinds, strict=True)
            for role in kind.methods
        )
        try:
            return self._runtime.Arena(size)
        except RefusedError as error:
            raise load_error(self._bundle.folder, error) from None

    def _weights(self, number: int) -> Any:
        """A block's weights file, of which and of whose program it is known that the engine can run them."""
        block = self.chain.blocks[number]
        kind = self.chain.kinds[block.kind]
        weights, program = self._bundle.file(block.weights), self._bundle.file(kind.program)
        if self._packed is not None:
            probes = {role: self._tried(number, role) for role in kind.methods}
            try:
                return self._packed.open(
                    HashedFile(program, self._bundle.hash_of(kind.program)),
                    HashedFile(weights, self._bundle.hash_of(block.weights)),
                    probes,
                )
            except RefusedError as error:
                raise load_error(weights, error) from None
        check_content(self._bundle.folder, self._bundle.manifest, block.weights)
        return self._runtime.WeightsFile(weights)

    def _try(self, number: int) -> None:
        """Load and run a block in a child process."""
        block = self.chain.blocks[number]
        program = self._programs[block.kind]

        def attempt() -> None:
            if self._packed is not None:
                self._runtime.without_threads()
            for role in self._roles & set(self.chain.kinds[block.kind].methods):
                outputs = [self._room(spec) for spec in self.interface(number, role).output_specs]
                program.load(role, weights=self.files[number]).run(self._tried(number, role), outputs)

        check_in_child(self._bundle.file(block.weights), attempt)

    def _tried(self, number: int, role: str) -> list[Array]:
        """Inputs of a method that reach every weight and the last rows of tables: the same at every call."""
        chain, block, random = self.chain, self.chain.blocks[number], np.random.default_rng(0)
        bounds = chain.bounds.of_call
        # Positions are indices: the program of the first block may have fewer than the manifest says.
        tokens = bounds.tokens if number == 0 else min(TRIED.tokens, bounds.tokens)
        sizes = replace(TRIED, tokens=tokens, states=min(TRIED.states, bounds.states))

        def one(name: str) -> Array:
            spec = self._shapes.of(number, role, name, sizes)
            dtype, shape = spec.dtype, spec.sizes
            if name.startswith(TABLE):
                # The last of a text's positions, or those of a row.
                start = bounds.context - shape[1] if role in (PREFILL, DECODE) and number == 0 else 0
                return self.tables.of(block.tables[int(name.removeprefix(TABLE))], shape[1], start)
            if dtype == "int64":
                most = chain.piece_words if name == "targets" else chain.vocabulary_size
                indices = random.integers(0, most, shape)
                indices[..., -1] = most - 1
                return indices
            return 0.1 * random.standard_normal(shape, np.float32)

        return [one(name) for name in chain.kinds[block.kind].methods[role].inputs]


def _untouched(size: int) -> Array:
    """Memory of float32 numbers, of which only pages that are written to take any."""
    memory = mmap.mmap(-1, max(4 * size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32, size)
