"""The stock runtime through ctypes: programs, weights files, arenas, methods.

    weights = WeightsFile(Path("000.ptd"))
    method = Program(Path("block.pte")).load("forward", weights=weights, arena=arena)
    shapes = method.run([state, ...], [next_state])

The engine reads and writes the arrays' own memory, while other Python threads keep running. Errors of the
runtime are EngineRefusalError.
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

from device_runner.engines.base import BoundCall, MethodMeta, Store, check_threads, tensor_spec
from device_runner.engines.errors import EngineRefusalError, captured_stderr, explain
from device_runner.engines.native.build import library
from prge.engine import Array
from prge.errors import EngineError
from prge.formats.bundle import file_sha256
from prge.formats.chain import TensorSpec
from prge.system.memory import OUT_OF_MEMORY_REMEDY, is_out_of_memory

_TEXT_BYTES = 1 << 14
_MAX_AXES = 16
_FAULT = -1
# From <malloc.h>: larger allocations are mapped on their own and returned to the system when freed.
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 1 << 20
_BACKEND = "libexecutorch_backend_xnnpack.so"


class Program:
    """A mapped and verified program file."""

    def __init__(self, path: Path) -> None:
        handle = ctypes.c_void_p()
        call("prge_open", os.fsencode(path), ctypes.byref(handle))
        self._handle = handle
        self._signatures: dict[str, MethodMeta] = {}
        weakref.finalize(self, interface().prge_close, handle)

    @property
    def methods(self) -> list[str]:
        """Names of the program's methods."""
        functions = interface()
        names = (
            functions.prge_method_name(self._handle, index)
            for index in range(functions.prge_methods(self._handle))
        )
        return [(name or b"").decode(errors="replace") for name in names]

    def signature(self, method: str) -> MethodMeta:
        """Return the specs of a method's inputs and outputs; dynamic sizes have their largest values."""
        if method not in self._signatures:
            self._signatures[method] = MethodMeta(self._tensors(method, 0), self._tensors(method, 1))
        return self._signatures[method]

    def arena_bytes(self, method: str) -> int:
        """Return the bytes of an arena that a method uses."""
        size = ctypes.c_size_t()
        call("prge_arena_bytes", self._handle, method.encode(), ctypes.byref(size))
        return size.value

    def load(self, method: str, weights: WeightsFile, arena: Arena | None = None) -> Method:
        """Load a method, which keeps this file, its weights and its arena alive.

        Args:
            method: name of one of the program's methods.
            weights: constants of the method; the program holds none.
            arena: memory shared by methods that never run at once; by default the method's own.
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
        dtype, rank, sizes = ctypes.c_int(), ctypes.c_size_t(), (ctypes.c_int64 * _MAX_AXES)()
        try:
            call(
                "prge_tensor", self._handle, method.encode(), outputs, index,
                ctypes.byref(dtype), ctypes.byref(rank), sizes, _MAX_AXES,
            )  # fmt: skip
        except EngineRefusalError:
            return None
        return tensor_spec(dtype.value, sizes[: rank.value]) if rank.value <= _MAX_AXES else None


class WeightsFile:
    """A mapped file of constants for a program that holds none.

    Args:
        path: a `.ptd` file.
        packed: file of these weights in the backend's format, for one program; see
            `device_runner.engines.packed_files`. Methods that are loaded with these weights map it.
        packing: whether loading methods writes `packed` instead. Weights that can't be written are refused.
    """

    def __init__(self, path: Path, packed: Path | None = None, packing: bool = False) -> None:
        handle = ctypes.c_void_p()
        packed_path = os.fsencode(packed) if packed is not None else None
        call("prge_open_weights", os.fsencode(path), packed_path, int(packing), ctypes.byref(handle))
        self.handle = handle
        self.packed = packed
        weakref.finalize(self, interface().prge_close_weights, handle)

    def release_pages(self) -> bool:
        """Release the mapped pages of methods, which read them again when they run.

        Returns False if that isn't possible: methods then keep their weights until they are freed.
        """
        return self.packed is not None and bool(interface().prge_give_back(self.handle))


class Arena:
    """Memory shared by methods that never run at once; pages take no memory until they are written.

    Args:
        size: bytes, the largest `Program.arena_bytes` of its methods.
    """

    def __init__(self, size: int) -> None:
        handle = ctypes.c_void_p()
        call("prge_open_arena", size, ctypes.byref(handle))
        self.handle = handle
        weakref.finalize(self, interface().prge_close_arena, handle)


class _Store(ctypes.Structure):
    """The struct `Store` of engine.cpp: a copy of an output into a cache."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("values", "cache", "positions")),
        *((name, ctypes.c_size_t) for name in ("rows", "parts", "part_bytes", "cache_part_bytes")),
    ]

    @classmethod
    def of(cls, store: Store) -> _Store:
        """Return the copy of an output into a cache of the same dtype."""
        (rows, heads, width), cache = store.values.shape, store.cache
        part_bytes = width * cache.itemsize
        addresses = (_address(array) for array in (store.values, cache, store.positions))
        return cls(*addresses, rows, heads, part_bytes, cache.shape[2] * part_bytes)


class _Request(ctypes.Structure):
    """One run of a method and the copies after it, in the layout of the C interface."""

    _fields_: ClassVar = [
        *(
            (name, ctypes.c_void_p)
            for name in ("method", "inputs", "sizes", "outputs", "room", "output_sizes", "stores")
        ),
        ("store_count", ctypes.c_size_t),
    ]


class Method:
    """A loaded method; see `Program.load`."""

    def __init__(self, handle: ctypes.c_void_p, signature: MethodMeta) -> None:
        self._handle = handle
        self._signature = signature
        self._call = _Call(handle, signature)
        weakref.finalize(self, interface().prge_unload, handle)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[tuple[int, ...]]:
        """Run the method once.

        Args:
            inputs: contiguous arrays of the method's dtypes and ranks, no size above the signature's.
            outputs: contiguous arrays of the method's dtypes and any shape, filled from their beginning. None
                shares memory with an input. An output as large as the signature's is written directly.

        Returns:
            The shape of each output's new content.
        """
        self._call.bind(inputs, outputs)
        call("prge_run", ctypes.byref(self._call.request), 1)
        return self._call.shapes()

    def bind(self, call: BoundCall) -> _Call:
        """Bind the arrays of a call without running it; they must fit as in `run`."""
        bound = _Call(self._handle, self._signature, call.stores)
        bound.bind(call.inputs, call.outputs)
        return bound


class _Call:
    """The arguments of a run."""

    def __init__(self, method: ctypes.c_void_p, signature: MethodMeta, stores: Sequence[Store] = ()) -> None:
        self._inputs = [_dtype_and_rank(tensor) for tensor in signature.inputs]
        self._outputs = [_dtype_and_rank(tensor) for tensor in signature.outputs]
        self._addresses = (ctypes.c_void_p * len(self._inputs))()
        self._sizes = (ctypes.c_int32 * sum(rank for _, rank in self._inputs))()
        self._output_addresses = (ctypes.c_void_p * len(self._outputs))()
        self._output_room = (ctypes.c_size_t * len(self._outputs))()
        self._output_sizes = (ctypes.c_int32 * sum(rank for _, rank in self._outputs))()
        self._stores = (_Store * len(stores))(*map(_Store.of, stores))
        arrays = (
            self._addresses, self._sizes, self._output_addresses, self._output_room, self._output_sizes,
            self._stores,
        )  # fmt: skip
        self.request = _Request(method, *(ctypes.addressof(array) for array in arrays), len(stores))

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Check arrays and store their addresses."""
        if len(inputs) != len(self._inputs) or len(outputs) != len(self._outputs):
            raise EngineRefusalError(
                f"the method takes {len(self._inputs)} inputs and {len(self._outputs)} outputs, "
                f"not {len(inputs)} and {len(outputs)}"
            )
        for index, array in enumerate(inputs):
            dtype, rank = self._inputs[index]
            if array.dtype != dtype or array.ndim != rank or not array.flags.c_contiguous:
                raise _shape_error("input", index, array, f"{dtype} with {rank} axes")
            self._addresses[index] = _address(array)
        self._sizes[:] = list(chain.from_iterable(array.shape for array in inputs))
        for index, array in enumerate(outputs):
            dtype, _ = self._outputs[index]
            if array.dtype != dtype or not array.flags.c_contiguous or not array.flags.writeable:
                raise _shape_error("output", index, array, f"{dtype} that can be written")
            self._output_addresses[index] = _address(array)
            self._output_room[index] = array.nbytes

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs."""
        sizes = iter(self._output_sizes)
        return [tuple(next(sizes) for _ in range(rank)) for _, rank in self._outputs]


def bind_calls(calls: Sequence[tuple[Method, BoundCall]]) -> Callable[[], None]:
    """Return a function that runs methods in order, each with inputs and outputs as in `Method.run`.

    The function reads the current contents of the arrays, skips the checks, and keeps the arrays alive. The
    caches of `stores` are float32.
    """
    bound = [(method, call, method.bind(call)) for method, call in calls]
    requests = (_Request * len(bound))(*(arguments.request for *_, arguments in bound))

    def compute() -> None:
        call("prge_run", requests, len(bound))

    return compute


def prepare() -> None:
    """Build and load the libraries unless they are loaded; raises EngineError if that fails."""
    interface()
    # glibc raises its threshold with every large array that is freed. Arrays then leave holes in the heap,
    # which grows by half while methods are loaded and freed.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def set_threads(threads: int | None) -> int:
    """Set the size of the process's thread pool unless it is None, and return the size.

    Raises:
        EngineError: the runtime is missing, or engines in use hold a pool of another size.
    """
    count = ctypes.c_int()
    with captured_stderr():
        try:
            call("prge_threads", 0, ctypes.byref(count))
            if check_threads(threads, count.value):
                call("prge_threads", threads, ctypes.byref(count))
        except EngineRefusalError as error:
            raise EngineError(
                f"The engine has no threads: {explain(error)}", code="threads-missing"
            ) from None
    return count.value


def without_threads() -> None:
    """Run methods in the calling thread only: a forked child lacks the pool's threads."""
    interface().prge_without_threads()


def backend_sha256() -> str:
    """Return the hash of the backend's library, which identifies the engine build.

    Raises:
        EngineError: the system doesn't report which library is loaded.
    """
    interface()
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if line.endswith(f"/{_BACKEND}")}
        return file_sha256(Path(min(paths)))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"The loaded {_BACKEND} can't be read: {error}", code="native-library-unusable"
        ) from None


def call(function: str, *arguments: Any) -> None:
    """Call a function of the interface that returns a code and a text.

    Raises:
        EngineRefusalError: the code is not 0.
    """
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    code = getattr(interface(), function)(*arguments, text, _TEXT_BYTES)
    if code:
        raise _refusal_error(code, text)


@lru_cache(maxsize=1)
def interface() -> Any:
    """Return the compiled interface.

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
        for name, (result_type, arguments) in types.items():
            function: Callable[..., Any] = getattr(functions, name)
            text = [ctypes.c_char_p, size] if result_type is ctypes.c_int else []
            function.restype = result_type  # type: ignore[attr-defined]
            function.argtypes = [*arguments, *text]  # type: ignore[attr-defined]
    except (OSError, AttributeError) as error:
        rebuild = f"Remove the folder {path.parent} to build it again, or use --engine torch."
        raise EngineError(
            f"The native engine's library can't be loaded: {error}",
            remedy=OUT_OF_MEMORY_REMEDY if is_out_of_memory(error) else rebuild,
            code="native-library-unusable",
        ) from None
    return functions


def _dtype_and_rank(tensor: TensorSpec | None) -> tuple[np.dtype[Any], int]:
    """Return dtype and rank of an input or output; a dtype that no array has if it isn't a numpy tensor."""
    try:
        return (np.dtype(tensor.dtype), len(tensor.sizes)) if tensor else (np.dtype("V"), 0)
    except TypeError:
        return np.dtype("V"), 0


def _address(array: Array) -> int:
    """Return the address of a contiguous array, four times as fast as `array.ctypes`."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):  # read-only or empty
        return array.ctypes.data


def _shape_error(name: str, index: int, array: Array, expected: str) -> EngineRefusalError:
    actual = f"{array.dtype} {list(array.shape)}"
    return EngineRefusalError(f"{name} {index} is {actual}, must be contiguous {expected}")


def _refusal_error(code: int, text: ctypes.Array[ctypes.c_char]) -> EngineRefusalError:
    log = text.value.decode(errors="replace")
    if code == _FAULT:
        return EngineRefusalError(log.strip().splitlines()[-1] if log.strip() else "the engine failed", log)
    return EngineRefusalError(f"error 0x{code:02x}", log, code)
