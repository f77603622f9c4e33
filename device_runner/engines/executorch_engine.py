"""The stock ExecuTorch runtime as an Engine: the raw extension module, without the compiler stack.

`executorch.runtime` would import the exporter, which costs seconds and 140 MB; the extension module below it
doesn't. torch is imported only because that extension takes its tensors; the native engine does without.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from device_runner.engines.base import ProgramEngine, Signature, check_threads
from device_runner.engines.refusals import RefusedError, captured_stderr
from prge.engine import Array
from prge.errors import EngineError
from prge.memory import GET_MEMORY, tells_no_memory


class ExecutorchEngine(ProgramEngine):
    """One loaded method of a program on the runtime's Python module; make it with `load`."""

    @staticmethod
    def prepare() -> None:
        """See ProgramEngine.prepare."""
        _runtime()

    @staticmethod
    def set_threads(threads: int | None) -> int:
        """See ProgramEngine.set_threads."""
        runtime = _runtime()
        with captured_stderr():
            count = int(runtime._threadpool_get_thread_count())
            if not check_threads(threads, count):
                return count
            runtime._unsafe_reset_threadpool(threads)
            return int(runtime._threadpool_get_thread_count())

    @staticmethod
    def open_program(path: Path) -> _Program:
        """See ProgramEngine.open_program."""
        return _Program(path)

    def _prepared(self, array: Array) -> Any:
        # torch can't look at a read-only array without a warning.
        return _runtime_torch().from_numpy(array if array.flags.writeable else array.copy())

    def _call(self, arguments: Sequence[Any]) -> Sequence[Array]:
        log = io.StringIO()
        try:
            with contextlib.redirect_stderr(log):
                outputs = self._method.loaded.call(arguments, clone_outputs=True)
        except RuntimeError as error:
            raise RefusedError(str(error), log.getvalue()) from None
        return [
            output.numpy().reshape(spec.shape)
            for spec, output in zip(self._contract.outputs, outputs, strict=True)
        ]


class _Program:
    """A mapped file whose tables were verified."""

    def __init__(self, path: Path) -> None:
        runtime = _runtime()
        verification = runtime.Verification.InternalConsistency
        self._program = runtime._load_program(str(path), program_verification=verification)

    @property
    def methods(self) -> list[str]:
        program = self._program
        return [program.get_method_name(index) for index in range(program.num_methods())]

    def signature(self, method: str) -> Signature:
        meta = self._program.method_meta(method)

        def tensor(info: Any, index: int) -> tuple[int, tuple[int, ...]] | None:
            try:
                return int(info(index).dtype()), tuple(info(index).sizes())
            except RuntimeError:
                return None

        return Signature(
            [tensor(meta.input_tensor_meta, index) for index in range(meta.num_inputs())],
            [tensor(meta.output_tensor_meta, index) for index in range(meta.num_outputs())],
        )

    def load(self, method: str, share_weights: bool) -> _Method:
        return _Method(self._program, self._program.load_method(method))


class _Method(NamedTuple):
    """A loaded method with its program, whose mapped file must outlive it."""

    program: Any
    loaded: Any


@lru_cache(maxsize=1)
def _runtime() -> Any:
    """The runtime's extension module; torch comes first because it loads the libraries that it links to."""
    _runtime_torch()
    problems = []
    for name in ("_C", "_portable_lib"):  # executorch 1.5, executorch 1.4
        try:
            return importlib.import_module(f"executorch.extension.pybindings.{name}")
        except ImportError as error:
            problems.append(str(error))
    raise EngineError(
        f"the ExecuTorch runtime can't be imported: {problems[0]}", remedy="pip install executorch"
    )


@lru_cache(maxsize=1)
def _runtime_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        remedy = GET_MEMORY if tells_no_memory(error) else "pip install torch"
        raise EngineError(f"torch can't be imported: {error}", remedy=remedy) from None
    return torch
