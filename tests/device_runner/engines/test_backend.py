"""The native engine is preferred and torch's module is the fallback; neither needs a compiler at import."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from device_runner.engines import torch_runtime
from device_runner.engines.backend import Backend, choose_backend
from device_runner.engines.native import runtime as native_runtime
from prge.errors import EngineError
from tests.compilers import needs_compiler
from tests.refusals import raises


@needs_compiler
def test_the_native_engine_is_preferred_and_its_absence_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_backend("auto") == choose_backend("native") == Backend("native")
    assert choose_backend("torch") == Backend("torch")
    native_runtime.interface.cache_clear()
    monkeypatch.setenv("PRGE_NATIVE_LIBRARY", str(tmp_path / "nothing.so"))
    try:
        fallen = choose_backend("auto")
        assert fallen.name == "torch" and "nothing.so, which is not a file" in fallen.reason
    finally:
        native_runtime.interface.cache_clear()


@pytest.mark.parametrize("threads", [0, -2])
@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_compiler)])
def test_an_impossible_number_of_threads_is_refused(name: str, threads: int) -> None:
    with raises(EngineError, "threads-out-of-bounds", containing=str(threads)):
        Backend(name).runtime.set_threads(threads)


def test_an_interrupt_while_the_runtime_is_imported_is_not_reported_as_a_missing_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(name: str) -> None:
        # Behaves like an extension module of pybind11.
        raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.setattr(importlib, "import_module", interrupted)
    torch_runtime.runtime.cache_clear()
    try:
        with pytest.raises(KeyboardInterrupt):
            torch_runtime.prepare()
    finally:
        torch_runtime.runtime.cache_clear()


def test_a_missing_runtime_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    torch_runtime.runtime.cache_clear()
    try:
        with raises(EngineError, "package-not-importable", containing="pip install executorch"):
            torch_runtime.prepare()
    finally:
        torch_runtime.runtime.cache_clear()
