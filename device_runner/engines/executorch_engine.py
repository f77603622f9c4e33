"""The stock ExecuTorch runtime as an Engine: the raw extension module, without the compiler stack.

    check     a forked child loads the program first: a damaged program can abort the whole process
    load      threads, then program, then method, and its inputs and outputs against the contract
    forward   numpy arrays in without copies of ours, fresh numpy arrays out

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
from typing import Any

import numpy as np

from device_runner.engines.base import (
    ProgramEngine,
    RefusedError,
    Signature,
    captured_stderr,
    check_threads,
    contract_problems,
    foreign_program,
    load_error,
)
from device_runner.engines.child_check import check_in_child
from prge.bundle import STEP_METHOD, Bundle
from prge.contract import Contract
from prge.engine import Array
from prge.errors import EngineError
from prge.memory import GET_MEMORY, tells_no_memory


class ExecutorchEngine(ProgramEngine):
    """One loaded method of a program on the runtime's Python module; make it with `load`."""

    def __init__(self, contract: Contract, program: Any, method: Any, threads: int) -> None:
        super().__init__(contract, threads)
        self._program = program  # its mapped file must outlive the method
        self._method = method

    @classmethod
    def load(
        cls, bundle: Bundle, threads: int | None = None, check: bool = True, method: str = STEP_METHOD
    ) -> ExecutorchEngine:
        """Load a method of a bundle's program.

        Args:
            bundle: an opened bundle.
            threads: size of the engine's thread pool, one for all engines of the process; by default what the
                runtime picks, the performance cores.
            check: whether a child process loads the program and runs it once first, so that a program on
                which the engine aborts gives an error. Costs one more load and one forward.
            method: one of the bundle's.

        Raises:
            BundleError: the engine refuses the program or aborts on it, or the program is not the manifest's.
            EngineError: the runtime is not installed, lacks memory, or its threads can't be changed any more.
        """
        runtime = _runtime()
        contract = bundle.methods[method]
        if check:
            check_method(bundle, method)
        # XNNPACK keeps a pointer to the pool that it was loaded with: a later change hangs.
        count = set_threads(threads)
        with captured_stderr() as log:
            try:
                program, loaded = _load(runtime, bundle.program, method, contract)
            except RuntimeError as error:
                raise load_error(bundle.program, RefusedError(str(error), log())) from None
        return cls(contract, program, loaded, count)

    def _prepared(self, array: Array) -> Any:
        # torch can't look at a read-only array without a warning.
        return _runtime_torch().from_numpy(array if array.flags.writeable else array.copy())

    def _call(self, arguments: Sequence[Any]) -> Sequence[Array]:
        log = io.StringIO()
        try:
            with contextlib.redirect_stderr(log):
                outputs = self._method.call(arguments, clone_outputs=True)
        except RuntimeError as error:
            raise RefusedError(str(error), log.getvalue()) from None
        return [
            output.numpy().reshape(spec.shape)
            for spec, output in zip(self._contract.outputs, outputs, strict=True)
        ]


def check_method(bundle: Bundle, method: str) -> None:
    """Load a method and run it once in a forked child, where an abort of the engine ends only the child.

    Check all methods before the first engine runs: a child lacks the threads that a running one waits for.

    Raises:
        BundleError, EngineError: the child was killed by a signal, or the engine refused the program.
    """
    runtime, path, contract = _runtime(), bundle.program, bundle.methods[method]

    def attempt() -> None:
        program, loaded = _load(runtime, path, method, None)
        if not _problems(program, method, contract):
            # Some damage shows only here: the engine follows a bad index into foreign memory.
            zeros = [np.zeros(spec.shape, spec.dtype) for spec in contract.inputs]
            loaded.call([_runtime_torch().from_numpy(array) for array in zeros], clone_outputs=True)

    check_in_child(path, attempt)


def set_threads(threads: int | None) -> int:
    """Set the size of the process's thread pool, unless it is None, and return it.

    Raises:
        EngineError: the runtime is not installed, or engines in use hold a pool of another size.
    """
    runtime = _runtime()
    with captured_stderr():
        count = int(runtime._threadpool_get_thread_count())
        if not check_threads(threads, count):
            return count
        runtime._unsafe_reset_threadpool(threads)
        return int(runtime._threadpool_get_thread_count())


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


def _load(runtime: Any, path: Path, method: str, contract: Contract | None) -> tuple[Any, Any]:
    """Program and method; RuntimeError for what the engine refuses, BundleError for a foreign program."""
    program = runtime._load_program(str(path), program_verification=runtime.Verification.InternalConsistency)
    if contract is not None:
        problems = _problems(program, method, contract)
        if problems:
            raise foreign_program(path, problems)
    return program, program.load_method(method)


def _problems(program: Any, method: str, contract: Contract) -> list[str]:
    names = [program.get_method_name(index) for index in range(program.num_methods())]
    return contract_problems(
        names, method, _signature(program.method_meta(method)) if method in names else None, contract
    )


def _signature(meta: Any) -> Signature:
    def tensor(info: Any, index: int) -> tuple[int, tuple[int, ...]] | None:
        try:
            return int(info(index).dtype()), tuple(info(index).sizes())
        except RuntimeError:
            return None

    return Signature(
        [tensor(meta.input_tensor_meta, index) for index in range(meta.num_inputs())],
        [tensor(meta.output_tensor_meta, index) for index in range(meta.num_outputs())],
    )
