"""What all engines of this package share: checks of calls, explained failures, and one thread pool."""

from __future__ import annotations

import gc
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from device_runner.engines.errors import explain, ran_out_of_memory
from prge.engine import Array, Call, Directions, FloatArray, GradFn, IntArray
from prge.errors import EngineError
from prge.formats.adapter import adapter_size
from prge.formats.chain import TensorSpec
from prge.model_spec import ModelSpec, matrices
from prge.system.memory import OUT_OF_MEMORY_REMEDY

Tensors = Sequence[TensorSpec | None]

# c10/core/ScalarType.h: the dtypes that programs use.
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


def tensor_spec(dtype_code: int, sizes: Sequence[int]) -> TensorSpec:
    """Return the spec of a tensor from ExecuTorch's metadata."""
    return TensorSpec(_DTYPES.get(dtype_code, f"ScalarType {dtype_code}"), tuple(sizes))


@dataclass(frozen=True)
class MethodMeta:
    """Specs of a method's inputs and outputs from its program; None for a value that isn't a tensor."""

    inputs: Tensors
    outputs: Tensors


@dataclass(frozen=True)
class Store:
    """Copies an output of a call into a cache after the call, each row to its own position.

    Attributes:
        values: the output, contiguous [rows, heads, width].
        cache: contiguous [at least as many rows, heads, capacity, width], of any float dtype.
        positions: i64 [rows], less than the capacity; read at the time of the copy.
    """

    values: FloatArray
    cache: Array
    positions: IntArray

    @cached_property
    def _rows(self) -> list[tuple[Array, FloatArray]]:
        # Making views takes most of the time of a small copy.
        return [(cache.swapaxes(0, 1), own) for cache, own in zip(self.cache, self.values, strict=False)]

    def run(self) -> None:
        """Copy the output's current content."""
        for position, (cache, own) in zip(self.positions.tolist(), self._rows, strict=True):
            cache[position] = own


@dataclass(frozen=True)
class BoundCall:
    """The arrays of a call that runs repeatedly; see `run` of a method."""

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    stores: Sequence[Store] = ()

    def run(self, method: Any) -> None:
        """Run a method of any engine with the current contents of the arrays."""
        method.run(self.inputs, self.outputs)
        for store in self.stores:
            store.run()


class CheckedEngine(ABC):
    """Implements prge.engine.Engine except for the computation: checks calls and explains failures.

    `calls` and `seconds` count calls and the time inside the engine; `threads` is the size of its thread
    pool.
    """

    def __init__(self, model: ModelSpec, threads: int) -> None:
        self.model = model
        self.threads = threads
        self.calls = 0
        self.seconds = 0.0
        self._adapter_size = adapter_size(model.modules)
        _loaded.add(self)

    def forward(self, call: Call) -> FloatArray:
        """See prge.engine.Engine.

        Raises:
            EngineError: the call doesn't fit the model, or the engine failed. The engine stays usable.
        """
        self._check(call)
        with self._computing():
            return self._forward(call)

    def jvp(self, call: Call, directions: Directions) -> tuple[FloatArray, FloatArray]:
        """See prge.engine.Engine; raises the errors of `forward`."""
        self._check(call, 1)
        self._check_directions(directions, len(call.sequences))
        with self._computing():
            return self._jvp(call, directions)

    def vjp(self, call: Call, grad_fn: GradFn) -> tuple[FloatArray, FloatArray]:
        """See prge.engine.Engine; raises the errors of `forward`."""
        self._check(call, 1)

        def checked(outputs: FloatArray) -> FloatArray:
            grads = np.asarray(grad_fn(outputs), np.float32)
            if grads.shape != outputs.shape:
                raise EngineError(
                    f"The gradient of the loss has the shape {list(grads.shape)}, the outputs have the shape "
                    f"{list(outputs.shape)}.",
                    remedy="An objective's gradients must have the shape of its scores.",
                    code="gradient-of-other-shape",
                )
            return grads

        with self._computing():
            return self._vjp(call, checked)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Count a call and its time, and explain a failure."""
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            remedy = (
                "Export the bundle again with this version of executorch; if the error remains, report it."
            )
            raise EngineError(
                f"The engine failed: {explain(error)}",
                remedy=OUT_OF_MEMORY_REMEDY if ran_out_of_memory(error) else remedy,
                code="engine-failed",
            ) from None
        self.seconds += time.perf_counter() - start
        self.calls += 1

    def _check(self, call: Call, copies: int | None = None) -> None:
        """Check a call: not every kernel checks its indices, and one out of range may read foreign memory."""
        model, adapters = self.model, call.adapters
        if not call.sequences:
            raise EngineError("The call has no sequences.", remedy="Pass at least one.", code="call-empty")
        expected = (len(adapters) if adapters.ndim and copies is None else copies or 1, self._adapter_size)
        if adapters.dtype != np.float32 or adapters.shape != expected or not adapters.size:
            raise EngineError(
                f"The adapters are {adapters.dtype} {list(adapters.shape)}, must be float32 "
                f"[{copies or 'copies'}, {self._adapter_size}]",
                code="adapters-of-other-shape",
            )
        for number, sequence in enumerate(call.sequences):
            sequence_length, vocabulary = len(sequence.tokens), model.vocabulary_size
            if not 1 <= sequence_length <= model.sequence_length:
                raise EngineError(
                    f"Sequence {number} has {sequence_length} tokens, not 1 to {model.sequence_length}.",
                    code="sequence-of-other-length",
                )
            if not (min(sequence.tokens) >= 0 and max(sequence.tokens) < vocabulary):
                raise EngineError(
                    f"Sequence {number} has a token outside of 0 to {vocabulary - 1}.",
                    code="token-out-of-bounds",
                )
            if branches := sequence.branches:
                if sequence_length > model.max_branched:
                    raise EngineError(
                        f"Sequence {number} has branches and {sequence_length} tokens, must have at most "
                        f"{model.max_branched}.",
                        remedy="Split the sequence into one for each branch.",
                        code="branched-too-long",
                    )
                if not all(a < b for a, b in pairwise((0, *branches, sequence_length))):
                    raise EngineError(
                        f"Sequence {number} of {sequence_length} tokens has branches at {list(branches)}; "
                        "they must be increasing indices of tokens after the first.",
                        code="branches-out-of-order",
                    )
            for target in sequence.targets:
                if not (0 <= target.position < sequence_length and 0 <= target.token < vocabulary):
                    raise EngineError(
                        f"Sequence {number} has the target {target.token} at {target.position}, must be 0 to "
                        f"{vocabulary - 1} at 0 to {sequence_length - 1}.",
                        code="target-out-of-bounds",
                    )

    def _check_directions(self, directions: Directions, sequences: int) -> None:
        trained_matrices = matrices(self.model.modules)
        widths = {matrix.u: matrix.rank for matrix in trained_matrices} | {
            matrix.v: matrix.width for matrix in trained_matrices
        }
        if directions.keys() != widths.keys():
            raise EngineError(
                f"Directions have {len(directions)} factors, must have {len(widths)}: u and v of every "
                "trained matrix.",
                code="directions-of-other-shape",
            )
        queries = len(next(iter(directions.values())))
        for name, width in widths.items():
            factor = directions[name]
            if factor.dtype != np.float32 or factor.shape != (queries, sequences, width) or not queries:
                raise EngineError(
                    f"The factor {name} is {factor.dtype} {list(factor.shape)}, must be float32 "
                    f"[queries, {sequences}, {width}]",
                    code="directions-of-other-shape",
                )

    @abstractmethod
    def _forward(self, call: Call) -> FloatArray:
        """Compute the outputs of a checked call; may raise RuntimeError."""

    @abstractmethod
    def _jvp(self, call: Call, directions: Directions) -> tuple[FloatArray, FloatArray]:
        """Compute the outputs and directional derivatives of a checked call; may raise RuntimeError."""

    @abstractmethod
    def _vjp(self, call: Call, grad_fn: Callable[[FloatArray], FloatArray]) -> tuple[FloatArray, FloatArray]:
        """Compute the outputs of a checked call and the gradient of a loss; may raise RuntimeError."""


# Living engines hold pointers to the thread pool, which all engines of the process share.
_loaded: weakref.WeakSet[CheckedEngine] = weakref.WeakSet()


def check_threads(threads: int | None, count: int) -> bool:
    """Return whether a pool of `count` threads must be resized to `threads`; None keeps its size.

    Raises:
        EngineError: `threads` is less than one, or engines in use hold a pool of another size.
    """
    if threads is not None and threads < 1:
        raise EngineError(f"threads is {threads}, must be at least 1.", code="threads-out-of-bounds")
    if threads is None or threads == count:
        return False
    if len(_loaded) > 0:
        # An engine without references may still be in a cycle, such as one through an exception's traceback.
        gc.collect()
    if len(_loaded) > 0:
        raise EngineError(
            f"An engine in use was opened with {count} threads, this one requests {threads}.",
            remedy="Use the same number of threads, or release the other engine first.",
            code="threads-differ",
        )
    return True
