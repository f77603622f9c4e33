"""The methods of a chain's blocks: loaded when their turn comes, with one arena, kept while memory allows.

    blocks.run(3, "stack", {"state": state, "lora_b.0": matrix, ...}) -> {"state": next_state}

A block's weights are mapped from its packed file where the engine can have one, else they are in memory.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from device_runner.engines.base import DTYPES, Signature
from device_runner.engines.child_check import check_in_child
from device_runner.engines.choice import Backend
from device_runner.engines.packed_files import HashedFile, PackedFiles
from device_runner.engines.refusals import RefusedError, captured_stderr, foreign_program, load_error
from device_runner.engines.tables import Tables
from prge.bundle import Bundle, chain_of, check_content
from prge.chain import STACK, TABLE, Interface, U, V
from prge.engine import Array
from prge.errors import EngineError

# Sizes that a method is tried with before it is used.
_TRIED_TOKENS = 4


class Blocks:
    """The blocks of an opened bundle on one of the engines.

    Args:
        bundle: an opened bundle with a chain.
        backend: the engine.
        roles: those that are going to be run.
        memory: bytes of weights that may stay loaded; by default all may.
        tell: called with what a user should know.

    Raises:
        BundleError: the engine refuses a file or aborts on it, or a file isn't the manifest's.
        EngineError: the runtime can't be had, or lacks memory; or no block fits into `memory`.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        roles: Iterable[str],
        memory: int | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.chain = chain_of(bundle)
        self.tables = Tables(bundle, self.chain)
        self._bundle = bundle
        self._runtime: Any = _runtime(backend)
        self._roles = {STACK, *roles}
        self._loaded: OrderedDict[tuple[int, str], Any] = OrderedDict()
        self._spare: dict[int, list[Array]] = {}
        self._memory = memory
        self._bytes = [bundle.file(block.weights).stat().st_size for block in self.chain.blocks]
        if memory is not None and memory < max(self._bytes):
            raise EngineError(
                f"no block may stay loaded: --memory is {memory} bytes, the largest block has "
                f"{max(self._bytes)}",
                remedy=f"give at least {max(self._bytes)}, or leave --memory out",
            )
        with captured_stderr() as log:
            try:
                self._programs = [
                    self._runtime.Program(bundle.file(kind.program)) for kind in self.chain.kinds
                ]
            except RuntimeError as error:
                raise load_error(bundle.folder, RefusedError(str(error), log())) from None
        self._check_interfaces()
        is_native = backend.name == "native"
        self._packed = PackedFiles(tell) if is_native else None
        self._files = [self._weights(number) for number in range(len(self.chain.blocks))]
        self._arena = self._new_arena() if is_native else None

    def run(self, number: int, role: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Compute a block.

        Args:
            number: of the block.
            role: of its kind's.
            inputs: contiguous arrays, all that the method asks for; more are left out.

        Returns:
            Outputs by name, in memory that `release` takes back.

        Raises:
            RefusedError: the engine failed.
        """
        kind = self.chain.blocks[number].kind
        interface = self.chain.kinds[kind].methods[role]
        signature = self._programs[kind].signature(role)
        outputs = [self._room(tensor) for tensor in signature.outputs]
        shapes = self._method(number, role).run([inputs[name] for name in interface.inputs], outputs)
        return {
            name: output[: math.prod(shape)].reshape(shape)
            for name, output, shape in zip(interface.outputs, outputs, shapes, strict=True)
        }

    def release(self, array: Array) -> None:
        """Let the memory of an output be used again."""
        if array.base is not None and array.base.ndim == 1:
            self._spare.setdefault(array.base.size, []).append(array.base)

    def _room(self, tensor: tuple[int, tuple[int, ...]]) -> Array:
        """Memory of an output of any size: pages that nothing was written to take none."""
        size = math.prod(tensor[1])
        spare = self._spare.get(size)
        return spare.pop() if spare else np.empty(size, np.float32)

    def _method(self, number: int, role: str) -> Any:
        key = number, role
        if key in self._loaded:
            self._loaded.move_to_end(key)
            return self._loaded[key]
        if self._memory is not None:
            held = sum(self._bytes[other] for other in {other for other, _ in self._loaded} | {number})
            while self._loaded and held > self._memory:
                (oldest, _), _ = self._loaded.popitem(last=False)
                if oldest != number and all(other != oldest for other, _ in self._loaded):
                    held -= self._bytes[oldest]
        self._loaded[key] = self._load(number, role, self._arena)
        return self._loaded[key]

    def _load(self, number: int, role: str, arena: Any) -> Any:
        program = self._programs[self.chain.blocks[number].kind]
        with captured_stderr() as log:
            try:
                return program.load(role, weights=self._files[number], arena=arena)
            except RuntimeError as error:
                refused = error if isinstance(error, RefusedError) else RefusedError(str(error), log())
                raise load_error(self._bundle.file(self.chain.blocks[number].weights), refused) from None

    def _new_arena(self) -> Any:
        return self._runtime.Arena(
            max(
                program.arena_bytes(role)
                for program, kind in zip(self._programs, self.chain.kinds, strict=True)
                for role in kind.methods
            )
        )

    def _weights(self, number: int) -> Any:
        """A block's weights file, of which and of whose program it is known that the engine can run them."""
        block = self.chain.blocks[number]
        kind = self.chain.kinds[block.kind]
        weights, program = self._bundle.file(block.weights), self._bundle.file(kind.program)
        probes = {role: self._tried(number, role) for role in kind.methods}
        if self._packed is not None:
            try:
                return self._packed.open(
                    HashedFile(program, self._bundle.hash_of(kind.program)),
                    HashedFile(weights, self._bundle.hash_of(block.weights)),
                    probes,
                )
            except RefusedError as error:
                raise load_error(weights, error) from None
        check_content(self._bundle.folder, self._bundle.manifest, block.weights)
        opened = self._runtime.WeightsFile(weights)

        def attempt() -> None:
            loaded = self._runtime.Program(program)
            for role in self._roles & set(kind.methods):
                outputs = [self._room(tensor) for tensor in loaded.signature(role).outputs]
                loaded.load(role, weights=self._runtime.WeightsFile(weights)).run(probes[role], outputs)

        if number == next(n for n, other in enumerate(self.chain.blocks) if other.kind == block.kind):
            check_in_child(weights, attempt)
        return opened

    def _tried(self, number: int, role: str) -> list[Array]:
        """Inputs of a method that reach every weight: the same at every call."""
        chain, block = self.chain, self.chain.blocks[number]
        is_head = self.is_head(number)
        lead = [1, 1] if role == STACK and not is_head else [1]
        length, random = _TRIED_TOKENS, np.random.default_rng(0)
        signature = self._programs[block.kind].signature(role)

        def one(name: str, bound: tuple[int, ...]) -> Array:
            if name in ("tokens", "targets"):
                labels = len(chain.label_tokens) if name == "targets" else 0
                return random.integers(0, labels or chain.vocabulary_size, [*lead, length])
            if name.startswith(TABLE):
                return self.tables.of(block.tables[int(name.removeprefix(TABLE))], length)
            shapes: dict[str, list[int]] = {
                "padding": [*lead, 1, 1, length],
                "ones": [1, length, 1],
                "state": [*lead, length, bound[-1]],
                "d_state": [1, *lead, length, bound[-1]],
                "slope": [1, length] if is_head else [*lead, length, bound[-1]],
                # Those of an adapter have the sizes of a call in front.
                name[: name.find(".") + 1]: [1] * (len(bound) - 2) + list(bound[-2:]),
            }
            if name.startswith((U, V)):
                return random.standard_normal([1, 1, bound[-1]], np.float32)
            prefix = name[: name.find(".") + 1] or name
            return 0.1 * random.standard_normal(shapes[prefix], np.float32)

        interface = chain.kinds[block.kind].methods[role]
        return [
            one(name, tensor[1])
            for name, tensor in zip(interface.inputs, signature.inputs, strict=True)
            if tensor is not None
        ]

    def is_head(self, number: int) -> bool:
        """Whether a block is a decoder's head."""
        return not self.chain.is_encoder and number == len(self.chain.blocks) - 1

    def _check_interfaces(self) -> None:
        """Raise BundleError for a program whose methods don't take what the manifest says."""
        for program, kind in zip(self._programs, self.chain.kinds, strict=True):
            problems = [
                problem
                for role, interface in kind.methods.items()
                for problem in _problems(program, role, interface)
            ]
            if problems:
                raise foreign_program(self._bundle.file(kind.program), problems)


def _problems(program: Any, role: str, interface: Interface) -> Iterable[str]:
    if role not in program.methods:
        yield f"its methods are {', '.join(program.methods)}, must include {role}"
        return
    signature: Signature = program.signature(role)
    for what, names, tensors in (
        ("input", interface.inputs, signature.inputs),
        ("output", interface.outputs, signature.outputs),
    ):
        if len(names) != len(tensors):
            yield f"{role} has {len(tensors)} {what}s, the manifest {len(names)}"
            continue
        for name, tensor in zip(names, tensors, strict=True):
            expected = "int64" if name in ("tokens", "targets") else "float32"
            found = DTYPES.get(tensor[0]) if tensor else None
            if found != expected and not name.startswith(TABLE):
                yield f"{what} {name} of {role} is {found}, must be {expected}"


def _runtime(backend: Backend) -> Any:
    if backend.name == "native":
        from device_runner.engines.native import runtime

        return runtime
    from device_runner.engines import torch_runtime

    return torch_runtime
