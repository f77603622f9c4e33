"""The stock runtime's Python module behind the same objects as `device_runner.engines.native.runtime`.

It is the raw extension module: `executorch.runtime` would import the exporter, which costs seconds and
140 MB. torch is imported only because that extension takes its tensors. It holds packed weights in memory,
plans memory for each method alone, and copies what goes in and out.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from device_runner.engines.base import Signature, check_threads, tensor_spec
from device_runner.engines.refusals import RefusedError, captured_stderr
from prge.engine import Array
from prge.errors import EngineError
from prge.files.chain import TensorSpec
from prge.host.memory import GET_MEMORY, tells_no_memory


class Program:
    """A mapped program file whose tables were verified."""

    def __init__(self, path: Path) -> None:
        module = runtime()
        verification = module.Verification.InternalConsistency
        self._path = path
        self._program = module._load_program(str(path), program_verification=verification)

    @property
    def methods(self) -> list[str]:
        """Their names."""
        program = self._program
        return [program.get_method_name(index) for index in range(program.num_methods())]

    def signature(self, method: str) -> Signature:
        """Inputs and outputs of a method; sizes that differ from call to call are the largest."""
        meta = self._program.method_meta(method)

        def tensor(info: Any, index: int) -> TensorSpec | None:
            try:
                return tensor_spec(int(info(index).dtype()), info(index).sizes())
            except RuntimeError:
                return None

        return Signature(
            [tensor(meta.input_tensor_meta, index) for index in range(meta.num_inputs())],
            [tensor(meta.output_tensor_meta, index) for index in range(meta.num_outputs())],
        )

    def load(self, method: str, weights: WeightsFile, arena: None = None) -> Method:
        """A method, which keeps what it uses; weights and memory are its own.

        What the runtime refuses of the weights shows in the first `run`.
        """
        # One for each method: what no method uses any more is freed.
        module = runtime()._load_for_executorch(str(self._path), str(weights.path))
        return Method(partial(module.run_method, method))


class WeightsFile:
    """A file of constants for programs that hold none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packed = None

    def give_back(self) -> bool:
        """Whether methods can stay without their weights: never."""
        return False


class Method:
    """A loaded method; `Program.load` makes it. What it needs of its program, the runtime keeps."""

    def __init__(self, function: Callable[[Sequence[Any]], Any]) -> None:
        self._function = function

    def call(self, tensors: Sequence[Any]) -> list[Any]:
        """Fresh torch tensors for torch tensors."""
        log = io.StringIO()
        try:
            with contextlib.redirect_stderr(log):
                return list(self._function(tensors))
        except RuntimeError as error:
            raise RefusedError(str(error), log.getvalue()) from None

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[tuple[int, ...]]:
        """See device_runner.engines.native.runtime.Method.run.

        The arrays are what the method takes: the runtime compares no more than their numbers of elements.
        """
        answers = [tensor.numpy() for tensor in self.call([tensor_of(array) for array in inputs])]
        for output, answer in zip(outputs, answers, strict=True):
            output.reshape(-1)[: answer.size] = answer.reshape(-1)
        return [answer.shape for answer in answers]


def in_a_row(calls: Sequence[tuple[Method, Sequence[Array], Sequence[Array]]]) -> Callable[[], None]:
    """See device_runner.engines.native.runtime.in_a_row."""

    def compute() -> None:
        for method, inputs, outputs in calls:
            method.run(inputs, outputs)

    return compute


def prepare() -> None:
    """Load the runtime, unless it is; raises EngineError where it can't be had."""
    runtime()


def set_threads(threads: int | None) -> int:
    """Set the size of the process's thread pool, unless it is None, and return it.

    Raises:
        EngineError: the runtime can't be had, or engines in use hold a pool of another size.
    """
    module = runtime()
    with captured_stderr():
        count = int(module._threadpool_get_thread_count())
        if not check_threads(threads, count):
            return count
        module._unsafe_reset_threadpool(threads)
        return int(module._threadpool_get_thread_count())


def tensor_of(array: Array) -> Any:
    """An array's memory as a torch tensor; of a read-only array a copy, for torch warns of those."""
    return _torch().from_numpy(array if array.flags.writeable else array.copy())


@lru_cache(maxsize=1)
def runtime() -> Any:
    """The runtime's extension module; torch comes first because it loads the libraries that it links to."""
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
        f"the ExecuTorch runtime can't be imported: {problems[0]}",
        remedy="pip install executorch",
        code="package-not-importable",
    )


@lru_cache(maxsize=1)
def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        remedy = GET_MEMORY if tells_no_memory(error) else "pip install torch"
        raise EngineError(
            f"torch can't be imported: {error}", remedy=remedy, code="package-not-importable"
        ) from None
    return torch
