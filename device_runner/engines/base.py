"""What the engines of this package share: loading, checks of programs and inputs, one pool of threads.

check     a forked child loads the program first: a damaged program can abort the whole process
load      threads, then program, then method, and its inputs and outputs against the contract
forward   checked numpy arrays in without copies of ours, fresh numpy arrays out
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from device_runner.engines.child_check import check_in_child
from device_runner.engines.refusals import (
    RefusedError,
    captured_stderr,
    explain,
    foreign_program,
    lacked_memory,
    load_error,
)
from prge.bundle import STEP_METHOD, Bundle
from prge.contract import LORA_B_PREFIX, U_PREFIX, V_PREFIX, Contract, TensorSpec
from prge.engine import Array
from prge.errors import EngineError
from prge.memory import GET_MEMORY

AnyEngine = TypeVar("AnyEngine", bound="ProgramEngine")
Tensors = Sequence["tuple[int, tuple[int, ...]] | None"]

_ADAPTER_PREFIXES = (LORA_B_PREFIX, U_PREFIX, V_PREFIX)
# c10/core/ScalarType.h, as far as a contract can name them
DTYPES = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    11: "bool",
    15: "bfloat16",
}


@dataclass(frozen=True)
class Signature:
    """A method as its program has it: ScalarType and shape of each tensor, None for what is no tensor."""

    inputs: Tensors
    outputs: Tensors


class Program(Protocol):
    """An opened program file; what the engine refuses is a RuntimeError."""

    @property
    def methods(self) -> list[str]:
        """Their names."""
        ...

    def signature(self, method: str) -> Signature:
        """Inputs and outputs of one of the methods."""
        ...

    def load(self, method: str, share_weights: bool) -> Any:
        """A method, which keeps what it needs of the program; see `ProgramEngine.load`."""
        ...


class CheckedEngine(ABC):
    """Implements prge.engine.Engine but for the call itself: inputs are checked, failures explained.

    `calls` and `seconds` count forwards and the time inside the engine; `threads` is the size of its pool.
    """

    def __init__(self, contract: Contract, threads: int) -> None:
        limits = _index_limits(contract)
        self._contract = contract
        self._expected = [
            (spec.name, (spec, np.dtype(spec.dtype), limits.get(spec.name))) for spec in contract.inputs
        ]
        self._kept: dict[str, tuple[Array, Any]] = {}
        self.threads = threads
        self.calls = 0
        self.seconds = 0.0
        _loaded.add(self)

    @property
    def contract(self) -> Contract:
        """Shapes, names and adapted modules of the loaded method."""
        return self._contract

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the program once.

        Args:
            inputs: an array of the contract's dtype and shape for every input name.

        Returns:
            A fresh array for every output name.

        Raises:
            EngineError: an input is missing, unknown, of another shape or dtype, or holds an index out of
                range; or the engine failed. The engine stays usable.
        """
        # With their arrays, whose memory they may point to. Those of an adapter are hundreds, in buffers that
        # callers fill anew for every call: what the engine takes of them is made once.
        arguments = []
        for name, expected in self._expected:
            array, kept = inputs.get(name), self._kept.get(name)
            arguments.append(kept if kept and kept[0] is array else self._argument(array, *expected))
        if len(inputs) != len(arguments):
            unknown = sorted(set(inputs) - {spec.name for spec in self._contract.inputs})
            raise EngineError(f"the program has no input {', '.join(unknown)}", remedy="leave it out")
        start = time.perf_counter()
        try:
            outputs = self._call([argument for _, argument in arguments])
        except RuntimeError as error:
            remedy = "export the bundle again with this version of executorch; if it stays, report it"
            raise EngineError(
                f"the engine failed in a forward: {explain(error)}",
                remedy=GET_MEMORY if lacked_memory(error) else remedy,
            ) from None
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return {spec.name: output for spec, output in zip(self._contract.outputs, outputs, strict=True)}

    @abstractmethod
    def _prepared(self, array: Array) -> Any:
        """A contiguous array as the engine takes it, which sees what is written to the array later."""

    @abstractmethod
    def _call(self, arguments: Sequence[Any]) -> Sequence[Array]:
        """Prepared arrays in the contract's order in, fresh arrays of its shapes out, or RuntimeError."""

    def _argument(
        self, array: Array | None, spec: TensorSpec, dtype: np.dtype[Any], limit: int | None
    ) -> tuple[Array, Any]:
        """A checked input and what the engine takes of it."""
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != spec.shape:
            raise _unfit(spec, array)
        if limit is not None:
            # Not every kernel checks its indices; one out of range may read foreign memory.
            low, high = int(array.min()), int(array.max())
            if low < 0 or high >= limit:
                raise EngineError(
                    f"the input {spec.name} holds {low if low < 0 else high}, must be in 0 to {limit - 1}"
                )
        array = np.ascontiguousarray(array)
        argument = array, self._prepared(array)
        # What is made of a read-only array may be a copy.
        if spec.name.startswith(_ADAPTER_PREFIXES) and array.flags.writeable:
            self._kept[spec.name] = argument
        return argument


class ProgramEngine(CheckedEngine):
    """One loaded method of a program, made by `load`; subclasses say how it is called."""

    def __init__(self, contract: Contract, threads: int, method: Any = None) -> None:
        super().__init__(contract, threads)
        self._method = method

    @classmethod
    def load(
        cls: type[AnyEngine],
        bundle: Bundle,
        threads: int | None = None,
        check: bool = True,
        method: str = STEP_METHOD,
        share_weights: bool = False,
    ) -> AnyEngine:
        """Load a method of a bundle's program.

        Args:
            bundle: an opened bundle.
            threads: size of the engine's thread pool, one for all engines of the process; by default what the
                runtime picks, the performance cores.
            check: whether a child process loads the program and runs it once first, so that a program on
                which the engine aborts gives an error. Costs one more load and one forward.
            method: one of the bundle's.
            share_weights: whether packed weights go where other engines that share theirs find them; only
                after `can_share` said so.

        Raises:
            BundleError: the engine refuses the program or aborts on it, or the program is not the manifest's.
            EngineError: the runtime can't be had, lacks memory, or its threads can't be changed any more.
        """
        contract = bundle.methods[method]
        if check:
            cls.check_method(bundle, method)
        # XNNPACK keeps a pointer to the pool that it was loaded with: a later change hangs.
        count = cls.set_threads(threads)
        with captured_stderr() as log:
            try:
                program = cls.open_program(bundle.program)
                problems = contract_problems(program, method, contract)
                if problems:
                    raise foreign_program(bundle.program, problems)
                loaded = program.load(method, share_weights)
            except RuntimeError as error:
                refused = error if isinstance(error, RefusedError) else RefusedError(str(error), log())
                raise load_error(bundle.program, refused) from None
        return cls(contract, count, loaded)

    @classmethod
    def check_method(cls, bundle: Bundle, method: str) -> None:
        """Load a method and run it once in a forked child, where an abort of the engine ends only the child.

        Check all methods before the first engine runs: a child lacks the threads that a running one waits
        for.

        Raises:
            BundleError, EngineError: the child was killed by a signal, or the engine refused the program.
        """
        cls.prepare()
        contract = bundle.methods[method]

        def attempt() -> None:
            program = cls.open_program(bundle.program)
            if method not in program.methods:
                return
            engine = cls(contract, 0, program.load(method, False))
            if not contract_problems(program, method, contract):
                # Some damage shows only here: the engine follows a bad index into foreign memory.
                engine.unchecked({spec.name: np.zeros(spec.shape, spec.dtype) for spec in contract.inputs})

        check_in_child(bundle.program, attempt)

    @classmethod
    def can_share(cls, bundle: Bundle, methods: Sequence[str] | None = None) -> bool:
        """Whether a bundle's methods, or some of them, can be loaded with the weights in memory once."""
        return False

    @staticmethod
    @abstractmethod
    def prepare() -> None:
        """Load the runtime itself, unless it is; raises EngineError where it can't be had."""

    @staticmethod
    @abstractmethod
    def set_threads(threads: int | None) -> int:
        """Set the size of the process's thread pool, unless it is None, and return it.

        Raises:
            EngineError: the runtime can't be had, or engines in use hold a pool of another size.
        """

    @staticmethod
    @abstractmethod
    def open_program(path: Path) -> Program:
        """Open a program file."""

    def unchecked(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Outputs for contiguous inputs that fit the contract; RuntimeError for what the engine refuses."""
        return self._call([self._prepared(inputs[spec.name]) for spec in self._contract.inputs])


def _unfit(spec: TensorSpec, array: Any) -> EngineError:
    expected = f"{spec.dtype} {list(spec.shape)}"
    if array is None:
        return EngineError(f"the input {spec.name} is missing", remedy=f"give it as {expected}")
    if not isinstance(array, np.ndarray):
        return EngineError(
            f"the input {spec.name} is a {type(array).__name__}, must be a numpy array {expected}"
        )
    return EngineError(f"the input {spec.name} is {array.dtype} {list(array.shape)}, must be {expected}")


# Those alive hold pointers to the thread pool, which is one for all engines of the process.
_loaded: weakref.WeakSet[CheckedEngine] = weakref.WeakSet()


def check_threads(threads: int | None, count: int) -> bool:
    """Whether a pool of `count` threads must become one of `threads`; None asks for no change.

    Raises:
        EngineError: less than one thread, or engines in use hold a pool of another size.
    """
    if threads is not None and threads < 1:
        raise EngineError(f"threads is {threads}, must be at least 1")
    if threads is None or threads == count:
        return False
    if len(_loaded) > 0:
        raise EngineError(
            f"a program in use was loaded with {count} threads, this one asks for {threads}",
            remedy="use one number of threads, or release the other engine first",
        )
    return True


def contract_problems(program: Program, method: str, contract: Contract) -> list[str]:
    """What a program's method has otherwise than a contract."""
    if method not in program.methods:
        return [f"its methods are {', '.join(program.methods)}, must include {method}"]
    signature = program.signature(method)
    problems = []
    for kind, specs, tensors in (
        ("input", contract.inputs, signature.inputs),
        ("output", contract.outputs, signature.outputs),
    ):
        if len(tensors) != len(specs):
            problems.append(f"it has {len(tensors)} {kind}s, the contract {len(specs)}")
            continue
        for spec, tensor in zip(specs, tensors, strict=True):
            if tensor is None:
                problems.append(f"{kind} {spec.name} is no tensor")
                continue
            dtype, shape = DTYPES.get(tensor[0], str(tensor[0])), tensor[1]
            if (shape, dtype) != (spec.shape, spec.dtype):
                problems.append(
                    f"{kind} {spec.name} is {dtype} {list(shape)}, not {spec.dtype} {list(spec.shape)}"
                )
    return problems


def probing_inputs(contract: Contract) -> dict[str, Array]:
    """Inputs that a contract allows and that reach every weight: the same ones at every call."""
    random = np.random.default_rng(0)
    limits = _index_limits(contract) | {"attention_mask": 1}
    return {
        spec.name: random.integers(0, limits[spec.name], spec.shape) + (spec.name == "attention_mask")
        if spec.name in limits
        else 0.1 * random.standard_normal(spec.shape, np.float32)
        for spec in contract.inputs
    }


def _index_limits(contract: Contract) -> dict[str, int]:
    """Upper bounds, exclusive, of the inputs that the program uses as indices."""
    labels = len(contract.label_tokens)
    return {
        "tokens": contract.vocabulary_size,
        "attention_mask": 2,
        "positions": contract.sequence_length,
        "targets": labels if contract.readout == "verbalizer" else contract.vocabulary_size,
        "cells": contract.rows * contract.candidates,
    }
