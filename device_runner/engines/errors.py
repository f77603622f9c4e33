"""Errors of the engine in words: its error codes, its log, and the exceptions that a user meets."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prge.errors import BundleError, EngineError, PrgeError
from prge.system.memory import is_out_of_memory

# executorch/runtime/core/error.h
_CODES = {
    0x01: "the engine failed internally",
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


class EngineRefusalError(RuntimeError):
    """An error of the engine, with its code if there is one, and what the engine logged."""

    def __init__(self, message: str, log: str = "", code: int | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.code = code


def program_mismatch(path: Path, problems: Sequence[str]) -> BundleError:
    """Return the error for a program that differs from the manifest."""
    return BundleError(
        f"{path} is not the program that the manifest describes: " + "; ".join(problems),
        remedy="Copy or export the bundle again: program and manifest don't belong together.",
        code="program-of-other-signature",
    )


def load_error(path: Path, error: RuntimeError) -> PrgeError:
    """Return the error for a program that the engine refused to load."""
    code = _code(error)
    what = f"The engine can't load {path}: {explain(error)}"
    if ran_out_of_memory(error):
        return EngineError(
            what, remedy="Close other programs, or export a smaller or quantized model.", code="out-of-memory"
        )
    if code in (0x14, 0x20, 0x30):
        return BundleError(
            what,
            remedy="Export the bundle with the executorch version that runs it, or copy it again.",
            code="program-of-other-version",
        )
    return BundleError(what, remedy="Copy or export the bundle again.", code="program-refused")


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return whether the engine ran out of memory, by its error code or its log."""
    log = getattr(error, "log", "")
    return _code(error) in _NO_MEMORY or is_out_of_memory(error) or is_out_of_memory(log)


def explain(error: RuntimeError) -> str:
    """Describe an ExecuTorch error in a sentence, with the first error that the engine logged."""
    code = _code(error)
    sentence = _CODES.get(0x21 if ran_out_of_memory(error) else code) if code is not None else None
    first = f"{sentence} (ExecuTorch 0x{code:02x})" if sentence else str(error).strip()
    return first + quote_log(getattr(error, "log", ""))


def _code(error: RuntimeError) -> int | None:
    """Return the error's code, or the one in an ExecuTorch message: `error 0x12`, `error: 0x:12`."""
    code = getattr(error, "code", None)
    if isinstance(code, int):
        return code
    match = re.search(r"error:?\s*0x:?([0-9a-fA-F]+)", str(error))
    if match:
        return int(match.group(1), 16)
    # ExecuTorch cuts messages at 256 characters, so a long path hides the code.
    return 0x22 if "DataLoader from file" in str(error) else None


def quote_log(log: str) -> str:
    """Return the first line of the engine's log that reports a failure, without those about the processor."""
    for line in log.splitlines():
        match = re.match(r"\[([\w.]+):\d+\] (.+)", line.strip())
        if match and not match.group(1).startswith("cpuinfo"):
            return f"; the engine says: {match.group(2).strip()}"
    return ""


@contextlib.contextmanager
def captured_stderr() -> Iterator[Any]:
    """Capture what native code and Python write to standard error; yield a function that returns it."""
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
                yield lambda: read_all(native) + python.getvalue()
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def read_all(stream: Any) -> str:
    """Return the content of a file that others write to, without moving its position."""
    return os.pread(stream.fileno(), 1 << 20, 0).decode(errors="replace")
