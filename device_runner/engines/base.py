"""What every engine of this package does with a call, and the one pool of threads that all share.

forward   checked numpy arrays in without copies of ours, fresh numpy arrays out
gradient  the same, and the slope of a loss back
"""

from __future__ import annotations

import gc
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from device_runner.engines.refusals import explain, lacked_memory
from prge.contract import Contract, TensorSpec
from prge.engine import Array, FloatArray, Slope
from prge.errors import EngineError
from prge.host.memory import GET_MEMORY

Tensors = Sequence["tuple[int, tuple[int, ...]] | None"]
_Found = TypeVar("_Found")

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
        self.threads = threads
        self.calls = 0
        self.seconds = 0.0
        _loaded.add(self)

    @property
    def contract(self) -> Contract:
        """Shapes, names and adapted modules."""
        return self._contract

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See prge.engine.Engine.

        Raises:
            EngineError: an input is missing, unknown, of another shape or dtype, or holds an index out of
                range; or the engine failed. The engine stays usable.
        """
        outputs = self._checked_call(inputs, self._call)
        return {spec.name: output for spec, output in zip(self._contract.outputs, outputs, strict=True)}

    def gradient(self, inputs: Mapping[str, Array], slope: Slope) -> tuple[FloatArray, dict[str, FloatArray]]:
        """See prge.engine.Engine; errors as of `forward`."""

        def checked(answers: FloatArray) -> FloatArray:
            found = np.asarray(slope(answers), np.float32)
            if found.shape != answers.shape:
                shapes = f"{list(found.shape)}, the answers {list(answers.shape)}"
                raise EngineError(
                    f"the slope of the loss has the shape {shapes}",
                    remedy="an objective's slopes have the shape of its scores",
                )
            return found

        return self._checked_call(inputs, lambda given: self._back(given, checked))

    def _checked_call(
        self, inputs: Mapping[str, Array], call: Callable[[dict[str, Array]], _Found]
    ) -> _Found:
        given = {name: _checked(inputs.get(name), *expected) for name, expected in self._expected}
        if len(inputs) != len(given):
            unknown = sorted(set(inputs) - {spec.name for spec in self._contract.inputs})
            raise EngineError(f"the engine has no input {', '.join(unknown)}", remedy="leave it out")
        start = time.perf_counter()
        try:
            found = call(given)
        except RuntimeError as error:
            remedy = "export the bundle again with this version of executorch; if it stays, report it"
            raise EngineError(
                f"the engine failed in a forward: {explain(error)}",
                remedy=GET_MEMORY if lacked_memory(error) else remedy,
            ) from None
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return found

    @abstractmethod
    def _call(self, inputs: dict[str, Array]) -> Sequence[Array]:
        """Checked arrays in, fresh arrays of the contract's shapes out in its order, or RuntimeError."""

    @abstractmethod
    def _back(
        self, inputs: dict[str, Array], slope: Callable[[FloatArray], FloatArray]
    ) -> tuple[FloatArray, dict[str, FloatArray]]:
        """Checked arrays in, answers and gradients by module out, or RuntimeError."""


def _checked(array: Array | None, spec: TensorSpec, dtype: np.dtype[Any], limit: int | None) -> Array:
    """A contiguous input that fits the contract."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != spec.shape:
        raise _unfit(spec, array)
    if limit is not None:
        # Not every kernel checks its indices; one out of range may read foreign memory.
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= limit:
            raise EngineError(
                f"the input {spec.name} holds {low if low < 0 else high}, must be in 0 to {limit - 1}"
            )
    return np.ascontiguousarray(array)


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
        # One that nobody has any more may be in a cycle, as an exception's traceback makes it.
        gc.collect()
    if len(_loaded) > 0:
        raise EngineError(
            f"an engine in use was opened with {count} threads, this one asks for {threads}",
            remedy="use one number of threads, or release the other engine first",
        )
    return True


def _index_limits(contract: Contract) -> dict[str, int]:
    """Upper bounds, exclusive, of the inputs that are used as indices."""
    return {
        "tokens": contract.vocabulary_size,
        "attention_mask": 2,
        "positions": contract.sequence_length,
        "targets": contract.vocabulary_size,
    }
