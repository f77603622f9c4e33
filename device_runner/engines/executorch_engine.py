"""The stock ExecuTorch runtime as an Engine, through its Python module and torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from device_runner.engines.base import ProgramEngine, check_threads
from device_runner.engines.refusals import captured_stderr
from device_runner.engines.torch_runtime import Program, runtime, tensor_of
from prge.engine import Array


class ExecutorchEngine(ProgramEngine):
    """One loaded method of a program on the runtime's Python module; make it with `load`."""

    @staticmethod
    def prepare() -> None:
        """See ProgramEngine.prepare."""
        runtime()

    @staticmethod
    def set_threads(threads: int | None) -> int:
        """See ProgramEngine.set_threads."""
        module = runtime()
        with captured_stderr():
            count = int(module._threadpool_get_thread_count())
            if not check_threads(threads, count):
                return count
            module._unsafe_reset_threadpool(threads)
            return int(module._threadpool_get_thread_count())

    @staticmethod
    def open_program(path: Path) -> Program:
        """See ProgramEngine.open_program."""
        return Program(path)

    def _prepared(self, array: Array) -> Any:
        return tensor_of(array)

    def _call(self, arguments: Sequence[Any]) -> Sequence[Array]:
        outputs = self._method.call(arguments)
        return [
            output.numpy().reshape(spec.shape)
            for spec, output in zip(self._contract.outputs, outputs, strict=True)
        ]
