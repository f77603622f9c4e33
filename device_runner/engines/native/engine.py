"""The stock ExecuTorch libraries as an Engine, through ctypes; a process on it never imports torch.

    check     a forked child loads the program first: a damaged program can abort the whole process
    load      threads, then program, then method, and its inputs and outputs against the contract
    forward   the arrays' own memory in, fresh numpy arrays out; other Python threads go on meanwhile

Engines that share weights hold those once that they have in common and pack alike. The runtime knows a weight
by the bytes of its values alone: one with the same bytes and another shape or scale silently gets the wrong
packing. So sharing is off unless `can_share` has compared the answers.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from device_runner.engines.base import (
    ProgramEngine,
    RefusedError,
    Signature,
    captured_stderr,
    check_threads,
    contract_problems,
    explain,
    foreign_program,
    load_error,
    probing_inputs,
)
from device_runner.engines.child_check import check_in_child
from device_runner.engines.native.build import library
from prge.bundle import STEP_METHOD, Bundle
from prge.contract import Contract
from prge.engine import Array
from prge.errors import EngineError, PrgeError
from prge.memory import GET_MEMORY, tells_no_memory

_TEXT_BYTES = 1 << 14
_MOST_AXES = 16
_FAULT = -1


class NativeEngine(ProgramEngine):
    """One loaded method of a program on the runtime's libraries; make it with `load`.

    `planned_bytes` is the memory of its values outside the backend.
    """

    def __init__(self, contract: Contract, method: _Method, threads: int) -> None:
        super().__init__(contract, threads)
        self._method = method

    @property
    def planned_bytes(self) -> int:
        """Memory that the program planned for this method's values outside the backend."""
        return self._method.planned_bytes

    @classmethod
    def load(
        cls,
        bundle: Bundle,
        threads: int | None = None,
        check: bool = True,
        method: str = STEP_METHOD,
        share_weights: bool = False,
    ) -> NativeEngine:
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
            EngineError: the libraries can't be had, lack memory, or the threads can't be changed any more.
        """
        contract = bundle.methods[method]
        if check:
            check_method(bundle, method)
        # XNNPACK keeps a pointer to the pool that it was loaded with: a later change hangs.
        count = set_threads(threads)
        with captured_stderr():
            try:
                program = _Program(bundle.program)
                problems = program.problems(method, contract)
                if problems:
                    raise foreign_program(bundle.program, problems)
                loaded = _Method(program, method, share_weights)
            except RefusedError as error:
                raise load_error(bundle.program, error) from None
        return cls(contract, loaded, count)

    def _prepared(self, array: Array) -> Any:
        return array.ctypes.data

    def _call(self, arguments: Sequence[Any]) -> Sequence[Array]:
        outputs = [np.empty(spec.shape, spec.dtype) for spec in self._contract.outputs]
        self._method.run(arguments, outputs)
        return outputs


def prepare() -> None:
    """Build and load the libraries, unless they are.

    Raises:
        EngineError: they can't be had; what it takes.
    """
    _interface()


def check_method(bundle: Bundle, method: str) -> None:
    """Load a method and run it once in a forked child, where an abort of the engine ends only the child.

    Check all methods before the first engine runs: a child lacks the threads that a running one waits for.

    Raises:
        BundleError, EngineError: the child was killed by a signal, or the engine refused the program.
    """
    prepare()
    path, contract = bundle.program, bundle.methods[method]

    def attempt() -> None:
        program = _Program(path)
        foreign = program.problems(method, contract)
        if method in program.methods:
            loaded = _Method(program, method, share_weights=False)
            if not foreign:
                # Some damage shows only here: the engine follows a bad index into foreign memory.
                zeros = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in contract.inputs}
                _answer(loaded, contract, zeros)

    check_in_child(path, attempt)


def can_share(bundle: Bundle, names: Sequence[str] | None = None) -> bool:
    """Whether a bundle has several methods whose answers stay the same bits with shared weights.

    Found in a forked child, like `check_method`, by running each method both ways. `names` are some of the
    bundle's methods; by default all.

    Raises:
        EngineError: the libraries can't be had.
    """
    prepare()
    path, every = bundle.program, bundle.methods
    methods = {name: every[name] for name in names or every}

    def attempt() -> None:
        program = _Program(path)
        inputs = {name: probing_inputs(contract) for name, contract in methods.items()}
        alone = [
            _answer(_Method(program, name, False), methods[name], arrays) for name, arrays in inputs.items()
        ]
        loaded = {name: _Method(program, name, True) for name in methods}
        together = [_answer(loaded[name], methods[name], arrays) for name, arrays in inputs.items()]
        if alone != together:
            raise RefusedError("the outputs differ")

    if len(methods) < 2 or not hasattr(os, "fork"):
        return False
    try:
        check_in_child(path, attempt)
    except PrgeError:
        return False
    return True


def _answer(method: _Method, contract: Contract, inputs: Mapping[str, Array]) -> list[bytes]:
    outputs = [np.empty(spec.shape, spec.dtype) for spec in contract.outputs]
    method.run([inputs[spec.name].ctypes.data for spec in contract.inputs], outputs)
    return [output.tobytes() for output in outputs]


def set_threads(threads: int | None) -> int:
    """Set the size of the process's thread pool, unless it is None, and return it.

    Raises:
        EngineError: the libraries can't be had, or engines in use hold a pool of another size.
    """
    count = ctypes.c_int()
    with captured_stderr():
        try:
            _call("prge_threads", 0, ctypes.byref(count))
            if check_threads(threads, count.value):
                _call("prge_threads", threads, ctypes.byref(count))
        except RefusedError as error:
            raise EngineError(f"the engine has no threads: {explain(error)}") from None
    return count.value


class _Program:
    """A mapped file whose tables were verified."""

    def __init__(self, path: Path) -> None:
        handle = ctypes.c_void_p()
        _call("prge_open", os.fsencode(path), ctypes.byref(handle))
        self.handle = handle
        weakref.finalize(self, _interface().prge_close, handle)

    @property
    def methods(self) -> list[str]:
        """Their names."""
        interface = _interface()
        names = (
            interface.prge_method_name(self.handle, index)
            for index in range(interface.prge_methods(self.handle))
        )
        return [(name or b"").decode(errors="replace") for name in names]

    def problems(self, method: str, contract: Contract) -> list[str]:
        """What this program has otherwise than a contract."""
        methods = self.methods
        signature = None
        if method in methods:
            signature = Signature(self._tensors(method, 0), self._tensors(method, 1))
        return contract_problems(methods, method, signature, contract)

    def _tensors(self, method: str, outputs: int) -> list[tuple[int, tuple[int, ...]] | None]:
        count = ctypes.c_size_t()
        _call("prge_count", self.handle, method.encode(), outputs, ctypes.byref(count))
        return [self._tensor(method, outputs, index) for index in range(count.value)]

    def _tensor(self, method: str, outputs: int, index: int) -> tuple[int, tuple[int, ...]] | None:
        dtype, rank, sizes = ctypes.c_int(), ctypes.c_size_t(), (ctypes.c_int64 * _MOST_AXES)()
        try:
            _call(
                "prge_tensor", self.handle, method.encode(), outputs, index,
                ctypes.byref(dtype), ctypes.byref(rank), sizes, _MOST_AXES,
            )  # fmt: skip
        except RefusedError:
            return None
        return dtype.value, tuple(sizes[: min(rank.value, _MOST_AXES)])


class _Method:
    """A loaded method; it keeps its program's file."""

    def __init__(self, program: _Program, name: str, share_weights: bool) -> None:
        handle = ctypes.c_void_p()
        _call("prge_load", program.handle, name.encode(), int(share_weights), ctypes.byref(handle))
        self._handle = handle
        weakref.finalize(self, _interface().prge_unload, handle)

    @property
    def planned_bytes(self) -> int:
        return int(_interface().prge_planned_bytes(self._handle))

    def run(self, inputs: Sequence[int], outputs: Sequence[Array]) -> None:
        """Addresses of contiguous arrays in the method's order; `outputs` are written."""
        written = [array.ctypes.data for array in outputs]
        _call("prge_run", self._handle, _pointers(inputs), _pointers(written))


def _pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _call(function: str, *arguments: Any) -> None:
    """Call a function of the interface that gives a code and a text.

    Raises:
        RefusedError: the code is not 0.
    """
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    code = getattr(_interface(), function)(*arguments, text, _TEXT_BYTES)
    if code:
        log = text.value.decode(errors="replace")
        if code == _FAULT:
            raise RefusedError(log.strip().splitlines()[-1] if log.strip() else "the engine failed", log)
        raise RefusedError(f"error 0x{code:02x}", log, code)


@lru_cache(maxsize=1)
def _interface() -> Any:
    """The compiled interface.

    Raises:
        EngineError: it can't be built or loaded.
    """
    path = library()
    try:
        with captured_stderr():
            interface = ctypes.CDLL(str(path))
        types: dict[str, tuple[Any, Sequence[Any]]] = {
            "prge_threads": (ctypes.c_int, [ctypes.c_int, ctypes.c_void_p]),
            "prge_open": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_void_p]),
            "prge_count": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]),
            "prge_tensor": (
                ctypes.c_int,
                [
                    *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t),
                    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
                ],
            ),
            "prge_load": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]),
            "prge_run": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]),
            "prge_close": (None, [ctypes.c_void_p]),
            "prge_unload": (None, [ctypes.c_void_p]),
            "prge_methods": (ctypes.c_size_t, [ctypes.c_void_p]),
            "prge_method_name": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_size_t]),
            "prge_planned_bytes": (ctypes.c_size_t, [ctypes.c_void_p]),
        }
        for name, (answer, arguments) in types.items():
            function: Callable[..., Any] = getattr(interface, name)
            text = [ctypes.c_char_p, ctypes.c_size_t] if answer is ctypes.c_int else []
            function.restype = answer  # type: ignore[attr-defined]
            function.argtypes = [*arguments, *text]  # type: ignore[attr-defined]
    except (OSError, AttributeError) as error:
        again = f"remove the folder {path.parent} to have it built again, or use --engine torch"
        raise EngineError(
            f"the native engine's library can't be loaded: {error}",
            remedy=GET_MEMORY if tells_no_memory(error) else again,
        ) from None
    return interface
