"""The stock runtime's objects through ctypes: programs, weights files, arenas, methods.

    weights = WeightsFile(Path("000.ptd"))
    method = Program(Path("block.pte")).load("score", weights=weights, arena=arena)
    shapes = method.run([state, ...], [next_state])

The arrays' own memory goes in and out; other Python threads go on meanwhile. What the runtime refuses is a
RefusedError.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from device_runner.engines.base import Signature, check_threads, tensor_spec
from device_runner.engines.native.build import library
from device_runner.engines.refusals import RefusedError, captured_stderr, explain
from prge.engine import Array
from prge.errors import EngineError
from prge.files.bundle import file_sha256
from prge.files.chain import TensorSpec
from prge.host.memory import GET_MEMORY, tells_no_memory

_TEXT_BYTES = 1 << 14
_MOST_AXES = 16
_FAULT = -1
# Of <malloc.h>; what is larger than so many bytes is mapped on its own, and given back when it is freed.
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 1 << 20
_BACKEND = "libexecutorch_backend_xnnpack.so"


class Program:
    """A mapped program file whose tables were verified."""

    def __init__(self, path: Path) -> None:
        handle = ctypes.c_void_p()
        call("prge_open", os.fsencode(path), ctypes.byref(handle))
        self._handle = handle
        self._signatures: dict[str, Signature] = {}
        weakref.finalize(self, interface().prge_close, handle)

    @property
    def methods(self) -> list[str]:
        """Their names."""
        functions = interface()
        names = (
            functions.prge_method_name(self._handle, index)
            for index in range(functions.prge_methods(self._handle))
        )
        return [(name or b"").decode(errors="replace") for name in names]

    def signature(self, method: str) -> Signature:
        """Inputs and outputs of a method; sizes that differ from call to call are the largest."""
        if method not in self._signatures:
            self._signatures[method] = Signature(self._tensors(method, 0), self._tensors(method, 1))
        return self._signatures[method]

    def arena_bytes(self, method: str) -> int:
        """Bytes of an arena that a method uses."""
        size = ctypes.c_size_t()
        call("prge_arena_bytes", self._handle, method.encode(), ctypes.byref(size))
        return size.value

    def load(self, method: str, weights: WeightsFile, arena: Arena | None = None) -> Method:
        """A method, which keeps this file, its weights and its arena.

        Args:
            method: one of the program's.
            weights: its constants; the program holds none.
            arena: of methods that never run at once; by default memory of its own.
        """
        handle = ctypes.c_void_p()
        call(
            "prge_load", self._handle, method.encode(), weights.handle, arena and arena.handle,
            ctypes.byref(handle),
        )  # fmt: skip
        return Method(handle, self.signature(method))

    def _tensors(self, method: str, outputs: int) -> list[TensorSpec | None]:
        count = ctypes.c_size_t()
        call("prge_count", self._handle, method.encode(), outputs, ctypes.byref(count))
        return [self._tensor(method, outputs, index) for index in range(count.value)]

    def _tensor(self, method: str, outputs: int, index: int) -> TensorSpec | None:
        dtype, rank, sizes = ctypes.c_int(), ctypes.c_size_t(), (ctypes.c_int64 * _MOST_AXES)()
        try:
            call(
                "prge_tensor", self._handle, method.encode(), outputs, index,
                ctypes.byref(dtype), ctypes.byref(rank), sizes, _MOST_AXES,
            )  # fmt: skip
        except RefusedError:
            return None
        return tensor_spec(dtype.value, sizes[: rank.value]) if rank.value <= _MOST_AXES else None


class WeightsFile:
    """A mapped file of constants for a program that holds none.

    Args:
        path: a `.ptd` file.
        packed: file of these weights in the backend's own form, for one program; see
            `device_runner.engines.packed_files`. Methods that are loaded with these weights map it.
        packing: whether methods that are loaded write `packed` instead. What they can't write is refused.
    """

    def __init__(self, path: Path, packed: Path | None = None, packing: bool = False) -> None:
        handle = ctypes.c_void_p()
        packed_path = os.fsencode(packed) if packed is not None else None
        call("prge_open_weights", os.fsencode(path), packed_path, int(packing), ctypes.byref(handle))
        self.handle = handle
        self.packed = packed
        weakref.finalize(self, interface().prge_close_weights, handle)

    def give_back(self) -> bool:
        """Give back the pages that methods have mapped, which read them again when they run.

        False where that can't be done: they keep their weights until they are gone.
        """
        return self.packed is not None and bool(interface().prge_give_back(self.handle))


class Arena:
    """Memory of methods that never run at once; pages that nothing wrote to take none.

    Args:
        size: bytes, the largest `Program.arena_bytes` of its methods.
    """

    def __init__(self, size: int) -> None:
        handle = ctypes.c_void_p()
        call("prge_open_arena", size, ctypes.byref(handle))
        self.handle = handle
        weakref.finalize(self, interface().prge_close_arena, handle)


class _Request(ctypes.Structure):
    """One run of a method, as the interface takes it."""

    _fields_: ClassVar = [
        (name, ctypes.c_void_p) for name in ("method", "inputs", "sizes", "outputs", "room", "output_sizes")
    ]


class Method:
    """A loaded method; `Program.load` makes it."""

    def __init__(self, handle: ctypes.c_void_p, signature: Signature) -> None:
        self._handle = handle
        self._signature = signature
        self._call = _Call(handle, signature)
        weakref.finalize(self, interface().prge_unload, handle)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[tuple[int, ...]]:
        """Compute once.

        Args:
            inputs: contiguous, of the method's dtypes and ranks, no size above the signature's.
            outputs: contiguous, of the method's dtypes and any shape; they are filled from their beginning.
                None lies in an input's memory. One that is as large as the signature's is written directly.

        Returns:
            The shape of what each output holds now.
        """
        self._call.give(inputs, outputs)
        call("prge_run", ctypes.byref(self._call.request), 1)
        return self._call.shapes()

    def call(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> _Call:
        """A call with arrays of its own, as of `run`."""
        made = _Call(self._handle, self._signature)
        made.give(inputs, outputs)
        return made


class _Call:
    """The arguments of a run."""

    def __init__(self, method: ctypes.c_void_p, signature: Signature) -> None:
        self._inputs = [_kind(tensor) for tensor in signature.inputs]
        self._outputs = [_kind(tensor) for tensor in signature.outputs]
        self._addresses = (ctypes.c_void_p * len(self._inputs))()
        self._sizes = (ctypes.c_int32 * sum(rank for _, rank in self._inputs))()
        self._output_addresses = (ctypes.c_void_p * len(self._outputs))()
        self._output_room = (ctypes.c_size_t * len(self._outputs))()
        self._output_sizes = (ctypes.c_int32 * sum(rank for _, rank in self._outputs))()
        arrays = self._addresses, self._sizes, self._output_addresses, self._output_room, self._output_sizes
        self.request = _Request(method, *(ctypes.addressof(array) for array in arrays))

    def give(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Check arrays, and note where they are."""
        if len(inputs) != len(self._inputs) or len(outputs) != len(self._outputs):
            raise RefusedError(
                f"the method takes {len(self._inputs)} inputs and {len(self._outputs)} outputs, "
                f"not {len(inputs)} and {len(outputs)}"
            )
        for index, array in enumerate(inputs):
            dtype, rank = self._inputs[index]
            if array.dtype != dtype or array.ndim != rank or not array.flags.c_contiguous:
                raise _unfit("input", index, array, f"{dtype} with {rank} axes")
            self._addresses[index] = _address(array)
        self._sizes[:] = list(chain.from_iterable(array.shape for array in inputs))
        for index, array in enumerate(outputs):
            dtype, _ = self._outputs[index]
            if array.dtype != dtype or not array.flags.c_contiguous or not array.flags.writeable:
                raise _unfit("output", index, array, f"{dtype} that can be written")
            self._output_addresses[index] = _address(array)
            self._output_room[index] = array.nbytes

    def shapes(self) -> list[tuple[int, ...]]:
        """Of what was computed."""
        sizes = iter(self._output_sizes)
        return [tuple(next(sizes) for _ in range(rank)) for _, rank in self._outputs]


def in_a_row(
    calls: Sequence[tuple[Method, Sequence[Array], Sequence[Array]]],
) -> Callable[[], None]:
    """A function that runs methods one after the other, each with its inputs and outputs as of `Method.run`.

    It computes of what the arrays hold when it is called, without the checks, and keeps all of them.
    """
    bound = [(each, each[0].call(*each[1:])) for each in calls]
    requests = (_Request * len(bound))(*(arguments.request for _, arguments in bound))

    def compute() -> None:
        call("prge_run", requests, len(bound))

    return compute


def prepare() -> None:
    """Build and load the libraries, unless they are; raises EngineError where they can't be had."""
    interface()
    # glibc raises its threshold with every large array that is freed: then arrays leave holes in the heap,
    # which grows by half while methods come and go.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def set_threads(threads: int | None) -> int:
    """Set the size of the process's thread pool, unless it is None, and return it.

    Raises:
        EngineError: the runtime can't be had, or engines in use hold a pool of another size.
    """
    count = ctypes.c_int()
    with captured_stderr():
        try:
            call("prge_threads", 0, ctypes.byref(count))
            if check_threads(threads, count.value):
                call("prge_threads", threads, ctypes.byref(count))
        except RefusedError as error:
            raise EngineError(
                f"the engine has no threads: {explain(error)}", code="threads-missing"
            ) from None
    return count.value


def without_threads() -> None:
    """Let methods do all work in the calling thread: for a forked child, which lacks the pool's threads."""
    interface().prge_without_threads()


def backend_sha256() -> str:
    """Hash of the backend's library, which tells builds of the engine apart.

    Raises:
        EngineError: the system doesn't tell which one is loaded.
    """
    interface()
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if line.endswith(f"/{_BACKEND}")}
        return file_sha256(Path(min(paths)))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"the loaded {_BACKEND} can't be read: {error}", code="native-library-unusable"
        ) from None


def call(function: str, *arguments: Any) -> None:
    """Call a function of the interface that gives a code and a text.

    Raises:
        RefusedError: the code is not 0.
    """
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    code = getattr(interface(), function)(*arguments, text, _TEXT_BYTES)
    if code:
        raise _refused(code, text)


@lru_cache(maxsize=1)
def interface() -> Any:
    """The compiled interface.

    Raises:
        EngineError: it can't be built or loaded.
    """
    path = library()
    try:
        with captured_stderr():
            functions = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        types: dict[str, tuple[Any, Sequence[Any]]] = {
            "prge_threads": (ctypes.c_int, [ctypes.c_int, pointer]),
            "prge_open": (ctypes.c_int, [ctypes.c_char_p, pointer]),
            "prge_count": (ctypes.c_int, [pointer, ctypes.c_char_p, ctypes.c_int, pointer]),
            "prge_tensor": (
                ctypes.c_int,
                [pointer, ctypes.c_char_p, ctypes.c_int, size, pointer, pointer, pointer, size],
            ),
            "prge_open_weights": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, pointer]),
            "prge_arena_bytes": (ctypes.c_int, [pointer, ctypes.c_char_p, pointer]),
            "prge_open_arena": (ctypes.c_int, [size, pointer]),
            "prge_load": (
                ctypes.c_int,
                [pointer, ctypes.c_char_p, pointer, pointer, pointer],
            ),
            "prge_run": (ctypes.c_int, [pointer, size]),
            "prge_without_threads": (None, []),
            "prge_close": (None, [pointer]),
            "prge_close_weights": (None, [pointer]),
            "prge_give_back": (ctypes.c_bool, [pointer]),
            "prge_close_arena": (None, [pointer]),
            "prge_unload": (None, [pointer]),
            "prge_methods": (size, [pointer]),
            "prge_method_name": (ctypes.c_char_p, [pointer, size]),
        }
        for name, (answer, arguments) in types.items():
            function: Callable[..., Any] = getattr(functions, name)
            text = [ctypes.c_char_p, size] if answer is ctypes.c_int else []
            function.restype = answer  # type: ignore[attr-defined]
            function.argtypes = [*arguments, *text]  # type: ignore[attr-defined]
    except (OSError, AttributeError) as error:
        again = f"remove the folder {path.parent} to have it built again, or use --engine torch"
        raise EngineError(
            f"the native engine's library can't be loaded: {error}",
            remedy=GET_MEMORY if tells_no_memory(error) else again,
            code="native-library-unusable",
        ) from None
    return functions


def _kind(tensor: TensorSpec | None) -> tuple[np.dtype[Any], int]:
    """dtype and rank of an input or output; no array has the dtype of one that isn't a tensor of numpy's."""
    try:
        return (np.dtype(tensor.dtype), len(tensor.sizes)) if tensor else (np.dtype("V"), 0)
    except TypeError:
        return np.dtype("V"), 0


def _address(array: Array) -> int:
    """Of a contiguous array's memory; a quarter of the time that `array.ctypes` takes."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):  # read-only or empty
        return array.ctypes.data


def _unfit(kind: str, index: int, array: Array, expected: str) -> RefusedError:
    found = f"{array.dtype} {list(array.shape)}"
    return RefusedError(f"{kind} {index} is {found}, must be contiguous {expected}")


def _refused(code: int, text: ctypes.Array[ctypes.c_char]) -> RefusedError:
    log = text.value.decode(errors="replace")
    if code == _FAULT:
        return RefusedError(log.strip().splitlines()[-1] if log.strip() else "the engine failed", log)
    return RefusedError(f"error 0x{code:02x}", log, code)
