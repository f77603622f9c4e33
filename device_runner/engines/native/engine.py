"""The stock ExecuTorch libraries as an Engine; a process on it never imports torch.

Engines that share weights hold those once that they have in common and pack alike. The runtime knows a weight
by the bytes of its values alone: one with the same bytes and another shape or scale silently gets the wrong
packing. So sharing is off unless `can_share` has compared the answers.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from device_runner.engines.base import ProgramEngine, check_threads, probing_inputs
from device_runner.engines.child_check import check_in_child
from device_runner.engines.native.runtime import Program, call, interface
from device_runner.engines.refusals import RefusedError, captured_stderr, explain
from prge.bundle import Bundle
from prge.engine import Array
from prge.errors import EngineError, PrgeError


class NativeEngine(ProgramEngine):
    """One loaded method of a program on the runtime's libraries; make it with `load`.

    `planned_bytes` is the memory of its values outside the backend.
    """

    @property
    def planned_bytes(self) -> int:
        """Memory that the program planned for this method's values outside the backend."""
        return self._method.planned_bytes

    @staticmethod
    def prepare() -> None:
        """Build and load the libraries, unless they are; raises EngineError where they can't be had."""
        interface()

    @staticmethod
    def set_threads(threads: int | None) -> int:
        """See ProgramEngine.set_threads."""
        count = ctypes.c_int()
        with captured_stderr():
            try:
                call("prge_threads", 0, ctypes.byref(count))
                if check_threads(threads, count.value):
                    call("prge_threads", threads, ctypes.byref(count))
            except RefusedError as error:
                raise EngineError(f"the engine has no threads: {explain(error)}") from None
        return count.value

    @staticmethod
    def open_program(path: Path) -> Program:
        """See ProgramEngine.open_program."""
        return Program(path)

    @classmethod
    def can_share(cls, bundle: Bundle, methods: Sequence[str] | None = None) -> bool:
        """Whether a bundle has several methods whose answers stay the same bits with shared weights.

        Found in a forked child, like `check_method`, by running each method both ways.
        """
        cls.prepare()
        contracts = {name: bundle.methods[name] for name in methods or bundle.methods}

        def attempt() -> None:
            program = Program(bundle.program)
            inputs = {name: probing_inputs(contract) for name, contract in contracts.items()}

            def load(name: str, share_weights: bool) -> NativeEngine:
                return cls(contracts[name], 0, program.load(name, share_weights))

            def answer(name: str, engine: NativeEngine) -> list[bytes]:
                return [output.tobytes() for output in engine.unchecked(inputs[name])]

            alone = [answer(name, load(name, False)) for name in contracts]
            loaded = {name: load(name, True) for name in contracts}
            if alone != [answer(name, engine) for name, engine in loaded.items()]:
                raise RefusedError("the outputs differ")

        if len(contracts) < 2 or not hasattr(os, "fork"):
            return False
        try:
            check_in_child(bundle.program, attempt)
        except PrgeError:
            return False
        return True

    def _prepared(self, array: Array) -> Any:
        return array

    def _call(self, arguments: Sequence[Any]) -> Sequence[Array]:
        outputs = [np.empty(spec.shape, spec.dtype) for spec in self._contract.outputs]
        self._method.run(arguments, outputs)
        return outputs
