"""The stock runtime's Python module, with the same classes as `device_runner.engines.native.runtime`.

It is the raw extension module: `executorch.runtime` would import the exporter, which costs seconds and 140
MB. torch is imported only because the extension takes its tensors. This engine holds packed weights in
memory, plans memory for each method alone, and copies inputs and outputs.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from device_runner.engines.base import BoundCall, MethodMeta, check_threads, tensor_spec
from device_runner.engines.errors import EngineRefusalError, captured_stderr
from prge.engine import Array
from prge.errors import EngineError
from prge.formats.chain import TensorSpec
from prge.system.memory import OUT_OF_MEMORY_REMEDY, is_out_of_memory


class Program:
    """A mapped and verified program file."""

    def __init__(self, path: Path) -> None:
        module = runtime()
        verification = module.Verification.InternalConsistency
        self._path = path
        self._program = module._load_program(str(path), program_verification=verification)

    @property
    def methods(self) -> list[str]:
        """Names of the program's methods."""
        program = self._program
        return [program.get_method_name(index) for index in range(program.num_methods())]

    def signature(self, method: str) -> MethodMeta:
        """Return the specs of a method's inputs and outputs; dynamic sizes have their largest values."""
        meta = self._program.method_meta(method)

        def tensor(info: Any, index: int) -> TensorSpec | None:
            try:
                return tensor_spec(int(info(index).dtype()), info(index).sizes())
            except RuntimeError:
                return None

        return MethodMeta(
            [tensor(meta.input_tensor_meta, index) for index in range(meta.num_inputs())],
            [tensor(meta.output_tensor_meta, index) for index in range(meta.num_outputs())],
        )

    def load(self, method: str, weights: WeightsFile, arena: None = None) -> Method:
        """Load a method, which keeps what it uses and has its own weights and memory.

        Errors of the weights only appear in the first `run`.
        """
        # One module per method, so that memory of unused methods is freed.
        module = runtime()._load_for_executorch(str(self._path), str(weights.path))
        return Method(partial(module.run_method, method))


class WeightsFile:
    """A file of constants for programs that hold none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packed = None

    def release_pages(self) -> bool:
        """Return whether methods can stay without their weights, which this engine never supports."""
        return False


class Method:
    """A loaded method; see `Program.load`. The runtime keeps the program alive."""

    def __init__(self, function: Callable[[Sequence[Any]], Any]) -> None:
        self._function = function

    def call(self, tensors: Sequence[Any]) -> list[Any]:
        """Run the method on torch tensors and return new torch tensors."""
        log = io.StringIO()
        try:
            with contextlib.redirect_stderr(log):
                return list(self._function(tensors))
        except RuntimeError as error:
            raise EngineRefusalError(str(error), log.getvalue()) from None

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[tuple[int, ...]]:
        """See device_runner.engines.native.runtime.Method.run.

        The arrays must fit the method: the runtime compares only their numbers of elements.
        """
        results = [tensor.numpy() for tensor in self.call([tensor_of(array) for array in inputs])]
        for output, result in zip(outputs, results, strict=True):
            output.reshape(-1)[: result.size] = result.reshape(-1)
        return [result.shape for result in results]


def bind_calls(calls: Sequence[tuple[Method, BoundCall]]) -> Callable[[], None]:
    """See device_runner.engines.native.runtime.bind_calls."""

    def compute() -> None:
        for method, call in calls:
            call.run(method)

    return compute


def prepare() -> None:
    """Load the runtime unless it is loaded; raises EngineError if it is missing."""
    runtime()


def set_threads(threads: int | None) -> int:
    """Set the size of the process's thread pool unless it is None, and return the size.

    Raises:
        EngineError: the runtime is missing, or engines in use hold a pool of another size.
    """
    module = runtime()
    with captured_stderr():
        count = int(module._threadpool_get_thread_count())
        if not check_threads(threads, count):
            return count
        module._unsafe_reset_threadpool(threads)
        return int(module._threadpool_get_thread_count())


def tensor_of(array: Array) -> Any:
    """Return a torch tensor of an array's memory, or of a copy if the array is read-only."""
    return _torch().from_numpy(array if array.flags.writeable else array.copy())


@lru_cache(maxsize=1)
def runtime() -> Any:
    """Return the runtime's extension module; importing torch first loads the libraries that it links to."""
    _torch()
    problems = []
    for name in ("_C", "_portable_lib"):  # executorch 1.5, executorch 1.4
        try:
            return importlib.import_module(f"executorch.extension.pybindings.{name}")
        except ImportError as error:
            if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            problems.append(str(error))
    raise EngineError(
        f"The ExecuTorch runtime can't be imported: {problems[0]}",
        remedy="pip install executorch",
        code="package-not-importable",
    )


@lru_cache(maxsize=1)
def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        remedy = OUT_OF_MEMORY_REMEDY if is_out_of_memory(error) else "pip install torch"
        raise EngineError(
            f"torch can't be imported: {error}", remedy=remedy, code="package-not-importable"
        ) from None
    return torch
