"""What the engines of this package share: inputs checked, refusals in words, one pool of threads.

An engine is one loaded method. `child_check` beside it finds damaged programs before one is loaded.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prge.contract import LORA_B_PREFIX, U_PREFIX, V_PREFIX, Contract, TensorSpec
from prge.engine import Array
from prge.errors import BundleError, EngineError, PrgeError
from prge.memory import GET_MEMORY, tells_no_memory

# executorch/runtime/core/error.h
_CODES = {
    0x01: "the engine failed inside",
    0x02: "the engine was in a state that doesn't allow this call",
    0x10: "the engine doesn't support this operation or shape",
    0x11: "the engine doesn't implement this operation",
    0x12: "an argument is invalid",
    0x13: "a tensor has a type that the engine doesn't take",
    0x14: "the program needs an operator that this engine lacks",
    0x20: "something that the program names was not found, such as a backend",
    0x21: "there is not enough memory",
    0x22: "the file can't be opened",
    0x23: "the program is damaged or of another format",
    0x24: "the program's external data is damaged",
    0x25: "the engine ran out of a resource",
    0x30: "the program's delegate is damaged or of another version",
    0x31: "there is not enough memory for the delegate",
    0x32: "the delegate is not usable",
}
_ADAPTER_PREFIXES = (LORA_B_PREFIX, U_PREFIX, V_PREFIX)
_NO_MEMORY = frozenset({0x21, 0x25, 0x31})
# c10/core/ScalarType.h, as far as a contract can name them
_DTYPES = {
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


class ProgramEngine(ABC):
    """One loaded method of a program; subclasses say how it is called.

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
_loaded: weakref.WeakSet[ProgramEngine] = weakref.WeakSet()


class RefusedError(RuntimeError):
    """What the engine refused, with its code if it gave one and what it logged meanwhile."""

    def __init__(self, message: str, log: str = "", code: int | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.code = code


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


Tensors = Sequence["tuple[int, tuple[int, ...]] | None"]


@dataclass(frozen=True)
class Signature:
    """A method as its program has it: ScalarType and shape of each tensor, None for what is no tensor."""

    inputs: Tensors
    outputs: Tensors


def contract_problems(
    methods: Sequence[str], method: str, signature: Signature | None, contract: Contract
) -> list[str]:
    """What a program has otherwise than a contract.

    Args:
        methods: names of the program's methods.
        method: the one that the contract describes.
        signature: of that method, None if there is no such one.
        contract: the manifest's.
    """
    if signature is None:
        return [f"its methods are {', '.join(methods)}, must include {method}"]
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
            dtype, shape = _DTYPES.get(tensor[0], str(tensor[0])), tensor[1]
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


def foreign_program(path: Path, problems: Sequence[str]) -> BundleError:
    """The error for a program with such problems."""
    return BundleError(
        f"{path} is not the program that the manifest describes: " + "; ".join(problems),
        remedy="copy or export the bundle again: program and manifest don't belong together",
    )


def load_error(path: Path, error: RuntimeError) -> PrgeError:
    """The error for a program that the engine refused."""
    code = _code(error)
    what = f"the engine can't load {path}: {explain(error)}"
    if lacked_memory(error):
        return EngineError(what, remedy="close other programs, or export a smaller or quantized model")
    if code in (0x14, 0x20, 0x30):
        return BundleError(
            what, remedy="export the bundle with the executorch version that runs it, or copy it again"
        )
    return BundleError(what, remedy="copy or export the bundle again")


def lacked_memory(error: RuntimeError) -> bool:
    """Whether memory ran out in the engine, by its code or by what it logged."""
    log = getattr(error, "log", "")
    return _code(error) in _NO_MEMORY or tells_no_memory(error) or tells_no_memory(log)


def explain(error: RuntimeError) -> str:
    """An ExecuTorch error as a sentence, with the engine's own first words where it said any."""
    code = _code(error)
    sentence = _CODES.get(0x21 if lacked_memory(error) else code) if code is not None else None
    first = f"{sentence} (ExecuTorch 0x{code:02x})" if sentence else str(error).strip()
    return first + quoted(getattr(error, "log", ""))


def _code(error: RuntimeError) -> int | None:
    """The error's code, or that in an ExecuTorch message: `error 0x12`, `error: 0x:12`."""
    code = getattr(error, "code", None)
    if isinstance(code, int):
        return code
    match = re.search(r"error:?\s*0x:?([0-9a-fA-F]+)", str(error))
    if match:
        return int(match.group(1), 16)
    # Messages are cut at 256 characters: a long path hides the code.
    return 0x22 if "DataLoader from file" in str(error) else None


def quoted(log: str) -> str:
    """The first line of the engine's log that tells a failure, not its reading of the processor."""
    for line in log.splitlines():
        match = re.match(r"\[([\w.]+):\d+\] (.+)", line.strip())
        if match and not match.group(1).startswith("cpuinfo"):
            return f"; the engine says: {match.group(2).strip()}"
    return ""


@contextlib.contextmanager
def captured_stderr() -> Iterator[Any]:
    """Keep what native code and Python write to standard error; gives a function that returns it."""
    try:
        saved = os.dup(2)
    except OSError:  # a process without standard error
        yield lambda: ""
        return
    with tempfile.TemporaryFile() as native:
        python = io.StringIO()
        os.dup2(native.fileno(), 2)
        try:
            with contextlib.redirect_stderr(python):
                yield lambda: content(native) + python.getvalue()
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def content(stream: Any) -> str:
    """What a file that others write to holds; its position stays theirs."""
    return os.pread(stream.fileno(), 1 << 20, 0).decode(errors="replace")


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
