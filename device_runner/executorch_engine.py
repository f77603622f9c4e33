"""The stock ExecuTorch runtime as an Engine: the raw extension module, without the compiler stack.

    check     a forked child loads the program first: a damaged program can abort the whole process
    load      threads, then program, then method, and its inputs and outputs against the contract
    forward   numpy arrays in without copies of ours, fresh numpy arrays out

`executorch.runtime` would import the exporter, which costs seconds and 140 MB; the extension module below it
doesn't. torch is imported only because that extension takes its tensors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import os
import re
import signal
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from prge.bundle import STEP_METHOD, Bundle
from prge.contract import Contract, TensorSpec
from prge.engine import Array
from prge.errors import BundleError, EngineError, PrgeError

CHECK_SECONDS = 600.0
_MOST_FILES = 1 << 16

# executorch/runtime/core/error.h
_CODES = {
    0x01: "the engine failed inside",
    0x02: "the engine was in a state that doesn't allow this call",
    0x10: "the engine doesn't support this operation or shape",
    0x11: "the engine doesn't implement this operation",
    0x12: "an argument is invalid",
    0x13: "a tensor has a type that the engine doesn't take",
    0x14: "the program needs an operator that this engine lacks",
    0x20: "something that the program names was not found, such as a backend",
    0x21: "there is not enough memory",
    0x22: "the file can't be opened",
    0x23: "the program is damaged or of another format",
    0x24: "the program's external data is damaged",
    0x25: "the engine ran out of a resource",
    0x30: "the program's delegate is damaged or of another version",
    0x31: "there is not enough memory for the delegate",
    0x32: "the delegate is not usable",
}
_NO_MEMORY = frozenset({0x21, 0x25, 0x31})
# c10/core/ScalarType.h, as far as a contract can name them
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


class ExecutorchEngine:
    """One loaded method of a program; make it with `load`.

    `calls` and `seconds` count forwards and the time inside the engine; `threads` is the size of its pool.
    """

    def __init__(self, contract: Contract, program: Any, method: Any, threads: int) -> None:
        self._contract = contract
        self._program = program  # its mapped file must outlive the method
        self._method = method
        self._limits = _index_limits(contract)
        self.threads = threads
        self.calls = 0
        self.seconds = 0.0

    @property
    def contract(self) -> Contract:
        """Shapes, names and adapted modules of the loaded method."""
        return self._contract

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
        with _captured_stderr() as log:
            try:
                program, loaded = _load(runtime, bundle.program, method, contract)
            except RuntimeError as error:
                raise _load_error(bundle.program, str(error), log()) from None
        engine = cls(contract, program, loaded, count)
        _loaded.add(engine)
        return engine

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the program once.

        Args:
            inputs: an array of the contract's dtype and shape for every input name.

        Returns:
            A fresh array for every output name.

        Raises:
            EngineError: an input is missing, unknown, of another shape or dtype, or holds an index out of
                range; or the engine failed. The engine stays usable.
        """
        from_numpy = _runtime_torch().from_numpy
        arrays = [self._checked(spec, inputs) for spec in self._contract.inputs]
        if len(inputs) != len(arrays):
            unknown = sorted(set(inputs) - {spec.name for spec in self._contract.inputs})
            raise EngineError(f"the program has no input {', '.join(unknown)}", remedy="leave it out")
        tensors = [from_numpy(array) for array in arrays]
        log = io.StringIO()
        start = time.perf_counter()
        try:
            with contextlib.redirect_stderr(log):
                outputs = self._method.call(tensors, clone_outputs=True)
        except RuntimeError as error:
            raise EngineError(
                f"the engine failed in a forward: {_explain(str(error), log.getvalue())}",
                remedy="export the bundle again with this version of executorch; if it stays, report it",
            ) from None
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return {
            spec.name: output.numpy().reshape(spec.shape)
            for spec, output in zip(self._contract.outputs, outputs, strict=True)
        }

    def _checked(self, spec: TensorSpec, inputs: Mapping[str, Array]) -> Array:
        array = inputs.get(spec.name)
        expected = f"{spec.dtype} {list(spec.shape)}"
        if array is None:
            raise EngineError(f"the input {spec.name} is missing", remedy=f"give it as {expected}")
        if not isinstance(array, np.ndarray):
            raise EngineError(
                f"the input {spec.name} is a {type(array).__name__}, must be a numpy array {expected}"
            )
        if array.dtype != np.dtype(spec.dtype) or array.shape != spec.shape:
            raise EngineError(
                f"the input {spec.name} is {array.dtype} {list(array.shape)}, must be {expected}"
            )
        limit = self._limits.get(spec.name)
        if limit is not None:
            # Not every kernel checks its indices; one out of range may read foreign memory.
            low, high = int(array.min()), int(array.max())
            if low < 0 or high >= limit:
                raise EngineError(
                    f"the input {spec.name} holds {low if low < 0 else high}, must be in 0 to {limit - 1}"
                )
        # torch can't look at a read-only array without a warning.
        return np.ascontiguousarray(array) if array.flags.writeable else array.copy()


# Those alive hold pointers to the thread pool.
_loaded: weakref.WeakSet[ExecutorchEngine] = weakref.WeakSet()


def check_method(bundle: Bundle, method: str) -> None:
    """Load a method and run it once in a forked child, where an abort of the engine ends only the child.

    Check all methods before the first engine runs: a child lacks the threads that a running one waits for.

    Raises:
        BundleError, EngineError: the child was killed by a signal, or the engine refused the program.
    """
    _check_in_child(_runtime(), bundle.program, method, bundle.methods[method])


def set_threads(threads: int | None) -> int:
    """Set the size of the process's thread pool, unless it is None, and return it.

    Raises:
        EngineError: the runtime is not installed, or engines in use hold a pool of another size.
    """
    runtime = _runtime()
    if threads is not None and threads < 1:
        raise EngineError(f"threads is {threads}, must be at least 1")
    with _captured_stderr():
        count = int(runtime._threadpool_get_thread_count())
        if threads is None or threads == count:
            return count
        if len(_loaded) > 0:
            raise EngineError(
                f"a program in use was loaded with {count} threads, this one asks for {threads}",
                remedy="use one number of threads, or release the other engine first",
            )
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
        raise EngineError(f"torch can't be imported: {error}", remedy="pip install torch") from None
    return torch


def _load(runtime: Any, path: Path, method: str, contract: Contract | None) -> tuple[Any, Any]:
    """Program and method; RuntimeError for what the engine refuses, BundleError for a foreign program."""
    program = runtime._load_program(str(path), program_verification=runtime.Verification.InternalConsistency)
    if contract is not None:
        problems = _contract_problems(program, method, contract)
        if problems:
            raise BundleError(
                f"{path} is not the program that the manifest describes: " + "; ".join(problems),
                remedy="copy or export the bundle again: program and manifest don't belong together",
            )
    return program, program.load_method(method)


def _contract_problems(program: Any, method: str, contract: Contract) -> list[str]:
    names = [program.get_method_name(index) for index in range(program.num_methods())]
    if method not in names:
        return [f"its methods are {', '.join(names)}, must include {method}"]
    meta = program.method_meta(method)
    problems = []
    for kind, specs, count, info in (
        ("input", contract.inputs, meta.num_inputs(), meta.input_tensor_meta),
        ("output", contract.outputs, meta.num_outputs(), meta.output_tensor_meta),
    ):
        if count != len(specs):
            problems.append(f"it has {count} {kind}s, the contract {len(specs)}")
            continue
        for index, spec in enumerate(specs):
            try:
                shape = tuple(info(index).sizes())
                dtype = _DTYPES.get(int(info(index).dtype()), str(info(index).dtype()))
            except RuntimeError:
                problems.append(f"{kind} {spec.name} is no tensor")
                continue
            if (shape, dtype) != (spec.shape, spec.dtype):
                problems.append(
                    f"{kind} {spec.name} is {dtype} {list(shape)}, not {spec.dtype} {list(spec.shape)}"
                )
    return problems


def _check_in_child(runtime: Any, path: Path, method: str, contract: Contract) -> None:
    if not hasattr(os, "fork"):
        return
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as log:
        with warnings.catch_warnings():
            # Python warns of forks while threads run; this child calls the engine and leaves.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _child(runtime, path, method, contract, answer.fileno(), log.fileno())
        status = _wait(child, CHECK_SECONDS)
        messages, noise = (_content(stream) for stream in (answer, log))
    if status is None:
        raise BundleError(
            f"the engine hangs on {path}: it was not loaded after {CHECK_SECONDS:.0f} seconds",
            remedy="copy or export the bundle again",
        )
    if os.WIFSIGNALED(status):
        code = os.WTERMSIG(status)
        if code == signal.SIGKILL:
            raise EngineError(
                f"the system ended the process that loaded {path} (SIGKILL)",
                remedy="most likely there is not enough memory: close other programs or use a smaller model",
            )
        if code not in _FAULTS:
            raise EngineError(
                f"the process that loaded {path} was ended by {_signal_name(code)}", remedy="start again"
            )
        raise BundleError(
            f"the engine aborts on this program ({_signal_name(code)}): {path}{_quoted(noise)}",
            remedy="copy or export the bundle again; the program is damaged or of another executorch",
        )
    if os.WEXITSTATUS(status) != 0:
        raise _load_error(path, messages, noise)


_FAULTS = frozenset(
    getattr(signal, name)
    for name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
    if hasattr(signal, name)
)


def _child(runtime: Any, path: Path, method: str, contract: Contract, answer: int, log: int) -> None:
    """The forked child: load, run, tell, leave without running anything of the parent's exit."""
    code = 1
    try:
        faulthandler.disable()
        with contextlib.suppress(Exception):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # A file that the parent has open may carry a lock, which would outlive a parent that is killed now.
        _close_all_but(answer, log)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
        program, loaded = _load(runtime, path, method, None)
        if not _contract_problems(program, method, contract):
            # Some damage shows only here: the engine follows a bad index into foreign memory.
            zeros = [np.zeros(spec.shape, spec.dtype) for spec in contract.inputs]
            loaded.call([_runtime_torch().from_numpy(array) for array in zeros], clone_outputs=True)
        code = 0
    except BaseException as error:
        os.write(answer, str(error).encode(errors="replace"))
    finally:
        os._exit(code)


def _close_all_but(*kept: int) -> None:
    """Close every file but the standard ones and those kept."""
    start = 3
    for number in sorted(kept):
        os.closerange(start, number)
        start = max(start, number + 1)
    os.closerange(start, _MOST_FILES)


def _wait(child: int, seconds: float) -> int | None:
    """A child's wait status; None if it had to be killed after `seconds`."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                return status
            time.sleep(pause)
            pause = min(pause * 2, 0.02)
        return None
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _content(stream: Any) -> str:
    # pread: the position belongs to whoever writes to this file.
    return os.pread(stream.fileno(), 1 << 20, 0).decode(errors="replace")


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(code).name
    except ValueError:
        return f"signal {code}"


def _load_error(path: Path, message: str, log: str) -> PrgeError:
    """The error for a program that the engine refused."""
    code = _code(message)
    what = f"the engine can't load {path}: {_explain(message, log)}"
    if code in _NO_MEMORY:
        return EngineError(what, remedy="close other programs, or export a smaller or quantized model")
    if code in (0x14, 0x20, 0x30):
        return BundleError(
            what, remedy="export the bundle with the executorch version that runs it, or copy it again"
        )
    return BundleError(what, remedy="copy or export the bundle again")


def _code(message: str) -> int | None:
    """The error code in an ExecuTorch message: `error 0x12`, `error: 0x:12`."""
    match = re.search(r"error:?\s*0x:?([0-9a-fA-F]+)", message)
    if match:
        return int(match.group(1), 16)
    # Messages are cut at 256 characters: a long path hides the code.
    return 0x22 if "DataLoader from file" in message else None


def _explain(message: str, log: str) -> str:
    """An ExecuTorch message as a sentence, with the engine's own last words where it said any."""
    code = _code(message)
    sentence = _CODES.get(code) if code is not None else None
    first = f"{sentence} (ExecuTorch 0x{code:02x})" if sentence else message.strip()
    return first + _quoted(log)


def _quoted(log: str) -> str:
    """The first line of the engine's log that tells a failure, not its reading of the processor."""
    for line in log.splitlines():
        match = re.match(r"\[([\w.]+):\d+\] (.+)", line.strip())
        if match and not match.group(1).startswith("cpuinfo"):
            return f"; the engine says: {match.group(2).strip()}"
    return ""


def _index_limits(contract: Contract) -> dict[str, int]:
    """Upper bounds, exclusive, of the inputs that the program uses as indices."""
    labels = len(contract.label_tokens)
    return {
        "tokens": contract.vocabulary_size,
        "attention_mask": 2,
        "positions": contract.sequence_length,
        "targets": labels if contract.readout == "verbalizer" else contract.vocabulary_size,
    }


@contextlib.contextmanager
def _captured_stderr() -> Iterator[Any]:
    """Keep what native code and Python write to standard error; gives a function that returns it."""
    try:
        saved = os.dup(2)
    except OSError:  # a process without standard error
        yield lambda: ""
        return
    with tempfile.TemporaryFile() as native:
        python = io.StringIO()
        os.dup2(native.fileno(), 2)
        try:
            with contextlib.redirect_stderr(python):
                yield lambda: _content(native) + python.getvalue()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
