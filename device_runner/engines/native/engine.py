"""The stock ExecuTorch libraries as an Engine, through ctypes; a process on it never imports torch.

The arrays' own memory goes in, fresh numpy arrays come out; other Python threads go on meanwhile.

Engines that share weights hold those once that they have in common and pack alike. The runtime knows a weight
by the bytes of its values alone: one with the same bytes and another shape or scale silently gets the wrong
packing. So sharing is off unless `can_share` has compared the answers.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from device_runner.engines.base import ProgramEngine, Signature, check_threads, probing_inputs
from device_runner.engines.child_check import check_in_child
from device_runner.engines.native.build import library
from device_runner.engines.refusals import RefusedError, captured_stderr, explain
from prge.bundle import Bundle
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

    @property
    def planned_bytes(self) -> int:
        """Memory that the program planned for this method's values outside the backend."""
        return self._method.planned_bytes

    @staticmethod
    def prepare() -> None:
        """Build and load the libraries, unless they are; raises EngineError where they can't be had."""
        _interface()

    @staticmethod
    def set_threads(threads: int | None) -> int:
        """See ProgramEngine.set_threads."""
        count = ctypes.c_int()
        with captured_stderr():
            try:
                _call("prge_threads", 0, ctypes.byref(count))
                if check_threads(threads, count.value):
                    _call("prge_threads", threads, ctypes.byref(count))
            except RefusedError as error:
                raise EngineError(f"the engine has no threads: {explain(error)}") from None
        return count.value

    @staticmethod
    def open_program(path: Path) -> _Program:
        """See ProgramEngine.open_program."""
        return _Program(path)

    @classmethod
    def can_share(cls, bundle: Bundle, methods: Sequence[str] | None = None) -> bool:
        """Whether a bundle has several methods whose answers stay the same bits with shared weights.

        Found in a forked child, like `check_method`, by running each method both ways.
        """
        cls.prepare()
        contracts = {name: bundle.methods[name] for name in methods or bundle.methods}

        def attempt() -> None:
            program = _Program(bundle.program)
            inputs = {name: probing_inputs(contract) for name, contract in contracts.items()}

            def load(name: str, share_weights: bool) -> NativeEngine:
                return cls(contracts[name], 0, program.load(name, share_weights))

            def answer(name: str, engine: NativeEngine) -> list[bytes]:
                return [output.tobytes() for output in engine.unchecked(inputs[name])]

            alone = [answer(name, load(name, False)) for name in contracts]
            loaded = {name: load(name, True) for name in contracts}
            if alone != [answer(name, engine) for name, engine in loaded.items()]:
                raise RefusedError("the outputs differ")

        if len(contracts) < 2 or not hasattr(os, "fork"):
            return False
        try:
            check_in_child(bundle.program, attempt)
        except PrgeError:
            return False
        return True

    def _prepared(self, array: Array) -> Any:
        return array.ctypes.data

    def _call(self, arguments: Sequence[Any]) -> Sequence[Array]:
        outputs = [np.empty(spec.shape, spec.dtype) for spec in self._contract.outputs]
        self._method.run(arguments, outputs)
        return outputs


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

    def signature(self, method: str) -> Signature:
        """Inputs and outputs of a method."""
        return Signature(self._tensors(method, 0), self._tensors(method, 1))

    def load(self, method: str, share_weights: bool) -> _Method:
        """A method that keeps this file."""
        return _Method(self, method, share_weights)

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
